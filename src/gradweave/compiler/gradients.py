"""Gradients between backward and update, in a traced step: accumulation, averages, loss scaling, clipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler

from gradweave._compat.amp import scaler_tensors, unscale_in_place, update_scale_in_place
from gradweave._compat.distributed import finish_sum, start_sum
from gradweave._runtime.peers.gradient_messages import in_memory_order, laid_out_like
from gradweave.step_graph.errors import PartialGradientsError
from gradweave.step_graph.nodes import gradient


@dataclass(frozen=True)
class Clipping:
    """Limits of gradients before the update.

    Attributes:
        max_norm: Of all gradients together; None for no limit.
        max_value: Of each element; None for no limit.
    """

    max_norm: float | None = None
    max_value: float | None = None


@dataclass(frozen=True)
class LossScaling:
    """Settings of a ``torch.amp.GradScaler``, whose work a traced step does."""

    growth: float
    backoff: float
    interval: int

    @classmethod
    def of(cls, scaler: GradScaler) -> LossScaling:
        """Return the settings that a scaler has now."""
        return cls(scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())

    def unscale(self, grads: Sequence[torch.Tensor | None], scale: torch.Tensor) -> torch.Tensor:
        """Divide gradients by the scale, in place; return 1 if any was not finite, otherwise 0."""
        present = [grad for grad in grads if grad is not None]
        found_inf = torch.zeros(1, device=scale.device)
        unscale_in_place(present, found_inf, scale.double().reciprocal().float())
        return found_inf

    def advance(self, scale: torch.Tensor, tracker: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Let the scale grow or back off, in place."""
        update_scale_in_place(scale, tracker, found_inf, self.growth, self.backoff, self.interval)


def scaler_inputs(scaler: GradScaler | None) -> list[torch.Tensor]:
    """Return the tensors of a scaler that a step reads and writes: its scale and its count of good steps."""
    return [] if scaler is None else list(scaler_tensors(scaler))


def restore_if_infinite(
    tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor], found_inf: torch.Tensor
) -> None:
    """Undo an update if a gradient was not finite.

    A graph has no branches: the update is computed in any case, and its result selected or dropped on the device.
    """
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(found_inf[0] > 0, old, tensor))


class Signals(NamedTuple):
    """What a rank tells the others of its step, beside its gradients; counts of ranks, once they are summed up.

    They are compared with zero only: in a message of bfloat16 a count of many ranks is no exact number.

    Attributes:
        updates_usually: Whether it updates by the kernels that the graph of such a step usually has.
        updates_otherwise: Whether it updates by others.
        has_unplanned: Whether it has gradients that no message carries.
    """

    updates_usually: float
    updates_otherwise: float
    has_unplanned: float = 0.0

    @classmethod
    def of(cls, updates_otherwise: bool, *, has_unplanned: bool = False) -> Signals:
        """Return the signals of a rank."""
        return cls(float(not updates_otherwise), float(updates_otherwise), float(has_unplanned))

    @property
    def is_mixed(self) -> bool:
        """Whether ranks update in different ways."""
        return self.updates_usually != 0 and self.updates_otherwise != 0


@dataclass(frozen=True)
class Averaging:
    """Averages of gradients over ranks.

    Attributes:
        group_name: Of the ranks' process group.
        share: What this rank's gradients are multiplied by.
        messages: Numbers of the trainable parameters in each message, in the order of sending.
        dtype: Dtype in which gradients travel; None for their own.
        updates_otherwise: Whether the step's update is not the one that steps of this kind usually have: other kernels
            round otherwise, and the other ranks must hear of it.
    """

    group_name: str
    share: float
    messages: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None = None
    updates_otherwise: bool = False

    def average(self, grads: list[torch.Tensor | None]) -> torch.Tensor:
        """Put averages in the place of gradients, and return the sums of all ranks' signals.

        A message is laid out as :class:`~gradweave._runtime.peers.gradient_messages.GradientMessages` lays out those of
        eager steps: one rank may take a step eagerly that others take as a graph.

        Raises:
            PartialGradientsError: If a gradient that a message is to carry is None, or one is in no message.
        """
        planned = {number for message in self.messages for number in message}
        if any(grad is not None and number not in planned for number, grad in enumerate(grads)):
            raise PartialGradientsError("a gradient is in no message")
        sent = []
        for place, message in enumerate(self.messages):
            parts = []
            for number in message:
                grad = grads[number]
                if grad is None:
                    raise PartialGradientsError("a parameter that others may send a gradient for has none")
                with gradient(number):
                    parts.append(in_memory_order((grad * self.share).to(self.dtype or grad.dtype)))
            # Not of a constant, which would have its own place in the graph, and hold the message up.
            like = parts[0]
            parts.append(like.new_ones(len(message)))
            if place == 0:
                parts += [like.new_full((1,), signal) for signal in Signals.of(self.updates_otherwise)]
            sent.append(start_sum(torch.cat(parts), self.group_name))
        heard = []
        for place, (message, wire) in enumerate(zip(self.messages, sent, strict=True)):
            given = [grad for number in message if (grad := grads[number]) is not None]
            rest = len(given) + (0 if place else len(Signals._fields))
            pieces = finish_sum(wire).split([*(grad.numel() for grad in given), rest])
            heard.append(pieces[-1])
            for number, grad, piece in zip(message, given, pieces, strict=False):
                grads[number] = laid_out_like(piece, grad).to(grad.dtype)
        signals: torch.Tensor = heard[0][-len(Signals._fields) :]
        return signals


def accumulate(grads: list[torch.Tensor | None], sums: Mapping[int, torch.Tensor], *, update: bool) -> None:
    """Add gradients to the sums of earlier micro-batches, or for an update the sums to the gradients.

    Args:
        grads: Of all parameters; those with a sum are replaced by the total for an update.
        sums: By number of the parameter; set to zero by an update.
        update: Whether the step updates.
    """
    for index, total in sums.items():
        grad = grads[index]
        if not update and grad is not None:
            total.add_(grad)
        elif update:
            grads[index] = total.clone() if grad is None else total + grad
            total.zero_()


def clip(params: Sequence[torch.Tensor], grads: list[torch.Tensor | None], clipping: Clipping) -> torch.Tensor | None:
    """Clip gradients in place as torch's utilities do; return their norm before, if it was computed."""
    if clipping.max_norm is None and clipping.max_value is None:
        return None
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    norm = None
    if clipping.max_norm is not None:
        norm = nn.utils.clip_grad_norm_(params, clipping.max_norm, foreach=False)
    if clipping.max_value is not None:
        nn.utils.clip_grad_value_(params, clipping.max_value, foreach=False)
    for p in params:
        p.grad = None
    return norm
