"""Eva and Eva-f: vectors of a layer's inputs, and of its outputs' gradients."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn
from torch.compiler import is_compiling

from gradweave._compat.eager import watchers
from gradweave._compat.foreach import zero_all
from gradweave._compat.tracing import is_traced_to_operations
from gradweave._logging import announce
from gradweave._runtime.claims import Technique, is_claimed, pipeline_part
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.optim.averaging import DEFAULT, Alike, Ranks
from gradweave.optim.base import COPY, Layer, VectorOptimizer, loss_scale, parameters_of
from gradweave.optim.deferred_step import Other
from gradweave.optim.hyperparameters import Given, Mode, check_hyperparameters
from gradweave.optim.kernels.step import FusedStep, is_capturing, is_fusible
from gradweave.optim.rules import (
    AUTHORS,
    INPUTS,
    JOINT,
    KL_CLIP,
    LEADING,
    NORMALIZE,
    Direction,
    Manner,
    Number,
    direction,
)
from gradweave.optim.statistics.coverage import Capture, CoveredLayer
from gradweave.optim.statistics.first_backward import FirstBackward
from gradweave.optim.statistics.hooks import Catching, Masked
from gradweave.optim.update import is_plain, look_ahead, new_momentum, times
from gradweave.optim.vector_exchange import average_records

REFERENCE_SAMPLES = 16
"""What the authors' code looks at."""

FEWEST_OUTPUTS = 16
"""Of a layer that has an output vector; of few outputs the leading direction is most of what there is to learn."""


class _CapturedVectors(VectorOptimizer):
    """An optimizer whose vectors are caught while the model runs.

    State of a weight: ``record`` (what was caught since the last step), ``input_vector`` and maybe
    ``output_vector`` (the running averages, by group), ``momentum_buffer``.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        manner: Manner,
        catching: Catching,
        process_group: Any,
    ) -> None:
        given = parameters_of(model, params)
        check_hyperparameters(defaults)
        self.ranks = Ranks(model, process_group)
        self._alike = Alike(type(self).__name__, model)
        self._catching = catching
        self._capture = Capture(model, catching, self.ranks)
        try:
            if not self._capture.layers and pipeline_part(model) is None:
                raise ArgumentError(
                    "model", type(model).__name__, "has no linear layer or convolution to train; use torch.optim.AdamW"
                )
            super().__init__(model, given, defaults, manner)
            self._fused = FusedStep(self)
            self._has_looked = False
            self._first_backward = FirstBackward(
                layer.weight for layer in self._capture.layers if layer.weight.requires_grad
            )
            self._attach()
            self._enlist()
        except BaseException:
            self._capture.remove()
            raise
        finalize(self, self._capture.remove).atexit = False
        finalize(self, self._first_backward.let_go).atexit = False

    def padding_mask(self, mask: torch.Tensor) -> Masked:
        """Context in which the model is run with padding in its batch.

        Args:
            mask: True, or 1, where a row counts; linear layers whose input has its shape, before
                the last dimension, leave the other rows out of their vectors.
        """
        return Masked(self._capture.masking, mask)

    def detach(self) -> None:
        """Takes the hooks off the model; the optimizer cannot step afterwards."""
        self._capture.remove()
        del self._capture

    def covered(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Weights of layers with hooks, each followed by its bias if that is given too."""
        given = set(map(id, params))
        chosen: list[torch.Tensor] = []
        for layer in self._capture.layers:
            if id(layer.weight) in given:
                chosen.append(layer.weight)
                if layer.bias is not None and id(layer.bias) in given:
                    chosen.append(layer.bias)
        return chosen

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters; those that have vectors get them."""
        super().add_param_group(param_group)
        if "defaults" in vars(self) and "state" in vars(self):
            self._attach()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave; vectors keep their precision."""
        super().load_state_dict(state_dict)
        if "_capture" in vars(self):
            self._capture.forget()
        self._attach()

    def _attach(self) -> None:
        """Gives records to layers whose weights have none, and their records to the hooks."""
        own = {id(p) for group in self.param_groups if group["rule"] == "vectors" for p in group["params"]}
        for layer in self._capture.layers:
            if id(layer.weight) not in own:
                layer.tap.use(None)
                continue
            state = self.state[layer.weight]
            if "record" not in state or state["record"].numel() != layer.tap.record_size:
                state["record"] = layer.tap.new_record(layer.weight)
            layout, record = layer.tap.layout, state["record"]
            if "input_vector" not in state:
                state["input_vector"] = record.new_zeros(layout.groups, layout.inputs)
            if not self._has_output_vector(layer):
                state.pop("output_vector", None)
            elif "output_vector" not in state:
                state["output_vector"] = record.new_zeros(layout.groups, layout.outputs)
            state["columns_first"] = layout.columns_first
            layer.tap.use(record)

    def _has_output_vector(self, layer: CoveredLayer) -> bool:
        """Whether a layer has one: what the authors' rules catch; in ours, a layer of more than a few outputs."""
        if self.manner.formula != LEADING:
            return self._catching.outputs
        layout = layer.tap.layout
        return layout.outputs >= FEWEST_OUTPUTS and not layout.columns_first

    def prepare_layer(self, layer: Layer) -> None:
        """Makes momentum; vectors were made with the optimizer."""
        if "_capture" not in vars(self):
            raise GradweaveError(COPY)
        layer.columns_first = bool(layer.state["columns_first"])
        self.prepare_size(layer)
        for p, state in ((layer.weight, layer.state), (layer.bias, layer.bias_state)):
            if p is not None and state is not None and "momentum_buffer" not in state:
                state["momentum_buffer"] = new_momentum(p)

    def begin_step(self) -> None:
        """Averages what was caught over data-parallel ranks."""
        over = None if self.ranks is None else self.ranks.group()
        if over is not None and dist.get_world_size(over) > 1:
            self._average(over)
        if not vars(self).get("_has_looked", True) and not is_compiling() and not watchers():
            self._look_at_first_step()

    def _average(self, over: Any) -> None:
        if is_claimed(self, Technique.COMPILE) or is_traced_to_operations():
            raise GradweaveError(
                "averages vectors over ranks, which compile() does not; train without compile(), or give "
                "process_group=None if each rank trains a model of its own"
            )
        params = [p for group in self.param_groups for p in group["params"]]
        records = [self.state[p]["record"] for p in params if "record" in self.state[p]]
        is_lent = self.ranks is None or self.ranks.lender is not None
        if not is_lent and not is_compiling() and not is_capturing(records[0].device):
            self._alike.check(over, params, records, self)
        average_records(records, over)

    def _look_at_first_step(self) -> None:
        """Raises if a backward has left gradients, and nothing of the layers that these are of: no hook has run.

        That is so where Dynamo has compiled a model before it had hooks: it does not look for new ones.
        """
        layers = self._capture.layers if "_capture" in vars(self) else []
        used = [layer for layer in layers if layer.weight.grad is not None and layer.tap.record is not None]
        if not used or is_capturing(used[0].weight.device):
            return
        counts = [layer.tap.count_of(self.state[layer.weight]["record"]).to("cpu") for layer in used]
        unseen = [layer.name for layer, count in zip(used, counts, strict=True) if not float(count) > 0]
        moved = not unseen or any(
            bool((layer.weight.grad != 0).any()) for layer in used if layer.weight.grad is not None
        )
        if not moved:
            return  # as checkpoints have a step taken, to have state made
        self._first_backward.let_go()
        self._has_looked = True
        if len(unseen) == len(used) and self._first_backward.has_run:
            raise GradweaveError(
                "there was a backward, and no hook of a layer has run: if the model was compiled and run before this "
                "optimizer was made, call torch.compiler.reset() now; under torch.func and the like layers are not "
                "seen, and need another optimizer"
            )
        if unseen:
            named = ", ".join(unseen[:3]) + (f" and {len(unseen) - 3} more" if len(unseen) > 3 else "")
            announce(
                f"optim: {named} have gradients, and their inputs were not seen in the first step: until they are, "
                "these gradients are used as they are",
                level=logging.WARNING,
            )

    def step_in_kernels(self, layers: list[Layer], others: list[Other]) -> bool:
        """Takes a step of our own rule on a GPU."""
        fused: FusedStep | None = vars(self).get("_fused")
        return fused is not None and is_fusible(self.manner) and fused.take(self, layers, others)

    def find_direction(
        self, layer: Layer, gradient_square: torch.Tensor, factor: Number, keep: torch.Tensor
    ) -> Direction:
        """Blends what was caught into the running vectors, and gives the direction."""
        inputs, outputs = self._blend(layer, factor, keep)
        group = layer.group
        fresh = times(layer.grad.to(inputs.dtype), factor)
        gradient = matrices(
            self._followed(fresh, layer.state, group), inputs.shape[0], columns_first=layer.columns_first
        )
        bias_fresh = bias_gradient = None
        if layer.bias_grad is not None and layer.bias_state is not None:
            bias_fresh = times(layer.bias_grad.to(inputs.dtype), factor)
            bias_gradient = self._followed(bias_fresh, layer.bias_state, group).view(gradient.shape[:2])
        square, moves = gradient_square, None
        if self.manner.momentum_first:
            square = gradient.square().sum() + (0.0 if bias_gradient is None else bias_gradient.square().sum())
            moves = (matrices(fresh, inputs.shape[0], columns_first=layer.columns_first) != 0).any(-1)
            if bias_fresh is not None:
                moves = moves | (bias_fresh.view(moves.shape) != 0)
        found = direction(
            self.manner,
            group["damping"],
            gradient,
            bias_gradient,
            square,
            inputs,
            outputs,
            output_damping=group["output_damping"],
            moves=moves,
            pointwise=is_plain(group),
        )
        if found.next_outputs is not None and outputs is not None:
            outputs.copy_(torch.where(keep, found.next_outputs, outputs))
        return found

    def _followed(self, fresh: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        """What a step goes along before anything is taken off: the gradient, or momentum that looks ahead."""
        if not self.manner.momentum_first:
            return fresh
        return look_ahead(fresh, state["momentum_buffer"].to(fresh.dtype), group["momentum"])

    def _blend(self, layer: Layer, factor: Number, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        state = layer.state
        record, running = state["record"], state["input_vector"]
        count = record[running.numel()]
        fresh = keep & (count > 0) & torch.isfinite(record.sum())
        safe = torch.where(count > 0, count, torch.ones_like(count))
        weight = layer.group["running_average"]
        _blend_into(running, record[: running.numel()] / safe, weight, fresh)
        outputs = state.get("output_vector")
        if outputs is not None and self.manner.formula != LEADING:
            new = record[running.numel() + 1 :] * self._inverse_loss_scale()
            if new.numel() == 0:
                new = self._from_bias(layer, outputs, factor)
            new = new if self._catching.per_sample else new / safe
            _blend_into(outputs, new.view(outputs.shape), weight, fresh)
        record.zero_()
        return running, outputs

    def _from_bias(self, layer: Layer, outputs: torch.Tensor, factor: Number) -> torch.Tensor:
        """An output vector that no hook could see: the bias' gradient is the sum that it is made of."""
        if layer.bias_grad is None:
            return torch.zeros_like(outputs)
        return layer.bias_grad.view(outputs.shape).to(outputs.dtype) * factor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, and the vectors that were caught with them."""
        super().zero_grad(set_to_none)
        layers = self._capture.layers if "_capture" in vars(self) else ()
        if layers:
            self._capture.forget()
        zero_all([layer.tap.record for layer in layers if layer.tap.record is not None])

    def _inverse_loss_scale(self) -> Number:
        """What a GradScaler's scale has to be taken off output vectors with; relative damping needs no size."""
        return 1 / loss_scale(self) if self.needs_loss_scale else 1.0

    @property
    def needs_loss_scale(self) -> bool:
        """Whether a loss that is scaled, without this optimizer knowing, would change its updates."""
        return self._catching.outputs and not self.manner.relative


def _blend_into(running: torch.Tensor, new: torch.Tensor, weight: Number, fresh: torch.Tensor) -> None:
    """Blends in place; the first vector is taken as it is."""
    new = new.view(running.shape)
    blended = torch.where((running != 0).any(), running + (new - running) * weight, new)
    running.copy_(torch.where(fresh, blended, running))


def matrices(grad: torch.Tensor, groups: int, *, columns_first: bool) -> torch.Tensor:
    """A weight's gradient as matrices: groups, rows, columns."""
    if columns_first:
        return grad.reshape(groups, grad.shape[0] // groups, -1).transpose(1, 2)
    return grad.reshape(groups, grad.shape[0] // groups, -1)


def _catching(mode: Mode, samples: int | None, *, outputs: bool) -> Catching:
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise ArgumentError("samples", samples, "give at least 1, or None")
    if mode is Mode.REFERENCE:
        samples = samples or REFERENCE_SAMPLES
        return Catching(outputs, samples, samples, per_sample=False)
    if mode is Mode.FAITHFUL:
        return Catching(outputs, samples, samples)
    return Catching(False, samples, words=False)


class EvaF(_CapturedVectors):
    """Eva-f: a layer's gradient times the damped inverse of its mean input's outer product.

    Needs nothing of backward but the gradient. By default the input vector is the whole batch's, damping
    is relative to its size, and a layer's step has the length ``lr`` times the norm its weight had at first, so
    that a good ``lr`` depends little on the model.

    Args:
        model: Whose layers are looked at; under DistributedDataParallel, the wrapped model.
        params: Parameters, or groups of them, if not all of the model's. A bias is part of its layer if
            both are in one group.
        lr: Learning rate.
        damping: Above 0; as a share of the vectors' squared size, or as it is in the authors' modes.
        momentum: Of gradients, in front of the direction; as in SGD, behind it, in the authors' modes.
        weight_decay: Decoupled, or added to the direction in the authors' modes.
        running_average: Weight of a step's vectors in the running ones.
        samples: How many of a batch's first samples to look at; None for what the mode has.
        kl_clip: The authors' limit.
        first_order: Rule for what has no vectors: ``"adamw"`` or ``"sgd"``.
        first_order_lr: Its learning rate; by default a twentieth of ``lr`` for AdamW, ``lr`` for SGD.
        first_order_weight_decay: Its weight decay; by default ``weight_decay``.
        betas: AdamW's.
        eps: AdamW's.
        maximize: Go up, not down.
        foreach: Update many tensors at once by torch's operations, or each by itself; by default the former, and
            kernels of our own on a GPU where they apply.
        capturable: Accepted for its convention: a step never waits for the device, and can always be captured.
        process_group: Over which vectors are averaged. By default over DistributedDataParallel's group, also where it
            wraps the model later, and without one over all ranks; None for no averaging.
        faithful: The algorithm as published.
        reference: The choices of the authors' code.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        lr: float | torch.Tensor | None = None,
        damping: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        running_average: float | None = None,
        samples: int | None = None,
        kl_clip: float = 0.001,
        first_order: str | None = None,
        first_order_lr: float | None = None,
        first_order_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        process_group: Any = DEFAULT,
        faithful: bool = False,
        reference: bool = False,
    ) -> None:
        mode = Mode.of(faithful=faithful, reference=reference)
        given = Given(
            lr, damping, momentum, weight_decay, running_average, kl_clip, first_order, first_order_lr,
            first_order_weight_decay, betas, eps, maximize, foreach, capturable,
        )  # fmt: skip
        manners = {
            Mode.OURS: Manner(INPUTS),
            Mode.FAITHFUL: Manner(INPUTS, **AUTHORS, divided=True, trust=KL_CLIP),
            Mode.REFERENCE: Manner(INPUTS, **AUTHORS, trust=NORMALIZE),
        }
        catching = _catching(mode, samples, outputs=False)
        super().__init__(model, params, given.defaults(mode), manners[mode], catching, process_group)


class Eva(_CapturedVectors):
    """Eva: preconditions from both sides, by vectors of inputs and of outputs' gradients.

    The published rule inverts one rank-one matrix for both sides together, which in practice leaves the gradient
    as it was, and its output vectors are zero in front of a BatchNorm. By default each side is damped by itself, and
    the output vector is the direction of outputs in which steps would be largest, found by one power iteration in each.

    Args:
        model: As in :class:`EvaF`, as all that is not named here.
        params: The same.
        lr: The same.
        damping: Of the inputs' side.
        output_damping: Of the outputs' side, as a share of it; not in the authors' modes, which have one for both.
        momentum: The same.
        weight_decay: The same.
        running_average: The same.
        samples: The same; in the authors' modes, of both vectors.
        kl_clip: The same.
        first_order: The same.
        first_order_lr: The same.
        first_order_weight_decay: The same.
        betas: The same.
        eps: The same.
        maximize: The same.
        foreach: The same.
        capturable: The same.
        process_group: The same.
        faithful: The same.
        reference: The same.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        lr: float | torch.Tensor | None = None,
        damping: float | None = None,
        output_damping: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        running_average: float | None = None,
        samples: int | None = None,
        kl_clip: float = 0.001,
        first_order: str | None = None,
        first_order_lr: float | None = None,
        first_order_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        process_group: Any = DEFAULT,
        faithful: bool = False,
        reference: bool = False,
    ) -> None:
        mode = Mode.of(faithful=faithful, reference=reference)
        given = Given(
            lr, damping, momentum, weight_decay, running_average, kl_clip, first_order, first_order_lr,
            first_order_weight_decay, betas, eps, maximize, foreach, capturable,
        )  # fmt: skip
        authors = Manner(JOINT, **AUTHORS, divided=True, trust=KL_CLIP)
        manner = Manner(LEADING) if mode is Mode.OURS else authors
        if not output_damping > 0:
            raise ArgumentError("output_damping", output_damping, "give a positive number")
        defaults = {**given.defaults(mode), "output_damping": output_damping}
        super().__init__(model, params, defaults, manner, _catching(mode, samples, outputs=True), process_group)
