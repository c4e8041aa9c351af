"""The ranks that train replicas of a model by compiled steps, and what they send each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.distributed import name_of_group
from gradweave._runtime.buckets import MESSAGE_BYTES, message_params, params_by_layer
from gradweave._runtime.lendable_ranks import lendable_ranks
from gradweave._runtime.peers.gradient_messages import GradientMessages
from gradweave._runtime.peers.groups import common_name
from gradweave._runtime.peers.lockstep import Changes
from gradweave._runtime.peers.replica_state import BufferBroadcast, ReplicaCheck, broadcast_state

_TECHNIQUE = "compile"


class ReplicaGroup:
    """Replicas of a model, one per rank, which average gradients as DistributedDataParallel does.

    A step sends the same messages whether it is a graph or runs eagerly, so that a rank may do the one while another
    does the other: a batch of another shape, say, has one of them make a graph while the others wait. The messages are
    made of whole layers, from the last to the first. They carry the parameters that the optimizer trains, except for
    those that no rank had a gradient of when ranks last agreed on it.

    Args:
        model: The model; its weights and buffers become the first rank's.
        optimizer: The optimizer.
        group: The ranks.
        dtype: Dtype in which gradients travel; None for their own.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup, *, dtype: torch.dtype | None = None
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._group = group
        self.name = name_of_group(group)
        self.share = 1.0 / dist.get_world_size(group)
        self.dtype = dtype
        self._changes = Changes(common_name("gradweave-compile", group), technique=_TECHNIQUE, timeout=None)
        self._buffers = BufferBroadcast(model, group)
        self._check = ReplicaCheck(model, optimizer, group, technique=_TECHNIQUE)
        self._trained: tuple[nn.Parameter, ...] = ()
        self._unused: set[nn.Parameter] = set()
        self._knows_unused = False
        self._buffers_are_due = True
        self._messages = GradientMessages((), group)
        broadcast_state(model, group)
        self._lent = lendable_ranks(optimizer)
        if self._lent is not None:
            self._lent.lend(group, lender=_TECHNIQUE)

    def close(self) -> None:
        """Take back from the optimizer what it was lent."""
        if self._lent is not None:
            self._lent.take_back()
            self._lent = None

    @property
    def messages(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """The parameters of each message, in the order of sending."""
        return self._messages.messages

    @property
    def is_learning(self) -> bool:
        """Whether the next step must run eagerly on all ranks, to tell them which parameters have no gradient."""
        return not self._knows_unused

    def begin_step(self, *, update: bool) -> None:
        """Share buffers and compare replicas, where it is time; all ranks call it before each step.

        Args:
            update: Whether the step updates, and so averages.
        """
        trained = tuple(self._trained_now())
        if len(trained) != len(self._trained) or any(p is not q for p, q in zip(trained, self._trained, strict=True)):
            self._train(trained)
        # As DistributedDataParallel: before the first forward of each round of micro-batches.
        if self._buffers_are_due:
            self._buffers.run()
        self._buffers_are_due = update
        if update:
            self._check.begin_round(is_unsettled=False)

    def end_step(self) -> None:
        """Note that weights were updated."""
        self._check.step_taken()

    def average(self) -> None:
        """Average all gradients that are there: for a step that is not one graph."""
        self.plan([p for p in self._unused if p.grad is not None])
        unused = self._messages.average()
        if not self._knows_unused:  # all ranks see the same flags
            self._knows_unused = True
            self._unused = set(unused)
            self._make_messages()

    def plan(self, params: Sequence[nn.Parameter]) -> None:
        """Agree with all ranks that parameters that had no gradient so far are in messages from here on."""
        new = [p for p in params if p in self._unused]
        if not new:
            return
        numbers = {p: number for number, p in enumerate(self._trained)}
        self._agree("parameters come to have gradients", sorted(numbers[p] for p in new))
        self._unused -= set(new)
        self._make_messages()

    def explain(self) -> str:
        """Return the number of ranks and of the messages of a step."""
        return f"{dist.get_world_size(self._group)} ranks average {len(self.messages)} message(s) a step"

    def _train(self, trained: tuple[nn.Parameter, ...]) -> None:
        """Make messages for other parameters than before, once all ranks have come to the same change."""
        if self._trained:
            known = {id(p): number for number, p in enumerate(self._model.parameters())}
            self._agree("which parameters are trained has changed", [known.get(id(p), -1) for p in trained])
        self._trained = trained
        self._knows_unused = False  # until the next step has told, a gradient of each may come
        self._unused = set()
        self._make_messages()

    def _agree(self, what: str, numbers: Iterable[int]) -> None:
        ranks = dist.get_process_group_ranks(self._group)
        self._changes.agree(what, ",".join(map(str, numbers)), ranks)

    def _make_messages(self) -> None:
        layers = params_by_layer(self._model, [p for p in self._trained if p not in self._unused])
        self._messages = GradientMessages(message_params(layers, 0, MESSAGE_BYTES), self._group, self.dtype)

    def _trained_now(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
