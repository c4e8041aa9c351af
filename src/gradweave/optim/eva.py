"""Eva and Eva-f: vectors of a layer's inputs, and of its outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn
from torch.compiler import is_compiling

from gradweave._compat.foreach import zero_all
from gradweave._compat.functions import dispatch_modes
from gradweave._compat.tracing import is_traced_to_operations
from gradweave._runtime.attachment import Attachment
from gradweave._runtime.claims import Technique, is_claimed, pipeline_part
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.optim.averaging import DEFAULT, Ranks, ReplicaCheck, average_records
from gradweave.optim.base import NO_HOOKS, Layer, VectorOptimizer, loss_scale, parameters_of
from gradweave.optim.hyperparameters import Hyperparameters, Mode, check_hyperparameters, with_shared_arguments
from gradweave.optim.kernels.launch import is_capturing
from gradweave.optim.kernels.step import FusedStep, is_fusible
from gradweave.optim.rules import (
    AUTHORS,
    INPUTS,
    JOINT,
    KL_CLIP,
    LEADING,
    NORMALIZE,
    Direction,
    Number,
    UpdateRule,
    direction,
)
from gradweave.optim.state import (
    VECTORS,
    FirstOrderRule,
    ParameterGroup,
    ParameterInGroup,
    ParameterState,
    new_momentum,
)
from gradweave.optim.statistics.coverage import Capture, CoveredLayer, FirstStepCheck
from gradweave.optim.statistics.hooks import MaskContext, StatisticsOptions
from gradweave.optim.update import is_plain, look_ahead, times

REFERENCE_SAMPLES = 16
"""Samples of a batch that the authors' code collects statistics of."""

FEWEST_OUTPUTS = 16
"""Outputs that a layer needs for an output vector: of few, the leading direction is most of what there is to learn."""

_ARGUMENTS = """
    samples: Number of a batch's first samples whose statistics are collected; by default all, or 16 for
        ``reference=True``.
    process_group: Ranks over which vectors are averaged. By default those of DistributedDataParallel, also where it
        wraps the model later, and without one all ranks; None for no averaging."""
"""The arguments that Eva and Eva-f share, in the form of their docstrings."""


class _StatisticsOptimizer(VectorOptimizer, Attachment):
    """An optimizer whose vectors are made of statistics that hooks collect while the model runs.

    A copy or an unpickled optimizer has the attributes of torch's optimizers only, and no hooks: methods that torch
    calls on such an object look for their attributes in ``vars(self)``.

    Args:
        model: As in the constructor of :class:`EvaF`.
        params: As there.
        defaults: Defaults of the hyperparameters.
        update_rule: The rule of groups with vectors.
        options: The statistics to collect.
        process_group: As in the constructor of :class:`EvaF`.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        update_rule: UpdateRule,
        options: StatisticsOptions,
        process_group: dist.ProcessGroup | str | None,
    ) -> None:
        given = parameters_of(model, params)
        check_hyperparameters(defaults)
        self.ranks = Ranks(model, process_group)
        self._replica_check = ReplicaCheck(type(self).__name__, model)
        self._options = options
        self._capture = Capture(model, options, self.ranks)
        try:
            if not self._capture.layers and pipeline_part(model) is None:
                raise UnsupportedError(
                    type(model).__name__, "it has no linear layer or convolution to train", "use torch.optim.AdamW"
                )
            super().__init__(model, given, defaults, update_rule)
            self._fused = FusedStep(self)
            self._first_step_check = FirstStepCheck(self._capture.layers, hold_nodes=not defaults["capturable"])
            self._attach()
            self._enlist()
        except BaseException:
            self._capture.remove()
            raise
        # The hooks refer to layers' records and not to the optimizer, and end with it: a model may get another one.
        finalize(self, self._capture.remove).atexit = False
        finalize(self, self._first_step_check.close).atexit = False

    def padding_mask(self, mask: torch.Tensor) -> MaskContext:
        """Return a context in which the model is run with padding in its batch.

        Args:
            mask: True, or 1, where a row counts. Linear layers whose input has the mask's shape, before the last
                dimension, leave the other rows out of their vectors.
        """
        return MaskContext(self._capture.masking, mask)

    @property
    def is_attached(self) -> bool:
        """Whether the model has its hooks."""
        return hasattr(self, "_capture")

    def explain(self) -> str:
        """Return how many parameters are updated by vectors, and how many by the first-order rule."""
        if not self.is_attached:
            return "detached: the model has no hooks, and the optimizer cannot step"
        by_vectors = sum(len(group["params"]) for group in self.param_groups if group["rule"] == VECTORS)
        others = sum(len(group["params"]) for group in self.param_groups) - by_vectors
        layers = len(self._capture.layers)
        return (
            f"{layers} layers with hooks; {by_vectors} parameters updated by vectors, {others} by the first-order rule"
        )

    def detach(self) -> None:
        """Remove the hooks from the model; the optimizer cannot step afterwards."""
        if not self.is_attached:
            return
        self._capture.remove()
        self._first_step_check.close()
        del self._capture

    def covered(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the weights of layers with hooks, each followed by its bias if that is given too."""
        given = set(map(id, params))
        chosen: list[torch.Tensor] = []
        for layer in self._capture.layers:
            if id(layer.weight) in given:
                chosen.append(layer.weight)
                if layer.bias is not None and id(layer.bias) in given:
                    chosen.append(layer.bias)
        return chosen

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with vectors for those of layers that have hooks."""
        super().add_param_group(param_group)
        if "defaults" in vars(self) and "state" in vars(self):  # not from torch's constructor, which has no state yet
            self._attach()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; vectors keep their precision."""
        super().load_state_dict(state_dict)
        if "_capture" in vars(self):
            self._capture.forget()
        self._attach()

    def _attach(self) -> None:
        """Create the state of layers that lack it, and give the hooks their layers' records."""
        own = {id(p) for group in self.param_groups if group["rule"] == VECTORS for p in group["params"]}
        for layer in self._capture.layers:
            if id(layer.weight) not in own:
                layer.tap.use(None)
                continue
            state = cast("ParameterState", self.state[layer.weight])
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
        """Return whether a layer has one: in the authors' rules if collected, in ours with more than a few outputs."""
        if self.update_rule.formula != LEADING:
            return self._options.outputs
        layout = layer.tap.layout
        return layout.outputs >= FEWEST_OUTPUTS and not layout.columns_first

    def prepare_layer(self, layer: Layer) -> None:
        """Create momentum; vectors were created with the optimizer."""
        if "_capture" not in vars(self):
            raise GradweaveError(NO_HOOKS)
        layer.columns_first = bool(layer.state["columns_first"])
        self.prepare_size(layer)
        for p, state in ((layer.weight, layer.state), (layer.bias, layer.bias_state)):
            if p is not None and state is not None and "momentum_buffer" not in state:
                state["momentum_buffer"] = new_momentum(p)

    def begin_step(self) -> None:
        """Average the statistics over data-parallel ranks, and check in the first step that there are any."""
        group = None if self.ranks is None else self.ranks.group()
        if group is not None and dist.get_world_size(group) > 1:
            self._average(group)
        check: FirstStepCheck | None = vars(self).get("_first_step_check")
        # A traced step computes with other tensors, and must not wait for their values.
        if check is not None and not check.is_done and not is_compiling() and not dispatch_modes():
            check.run(self.state)

    def _layers(self) -> list[CoveredLayer]:
        """Return the layers with hooks; none of a copy or after :meth:`detach`."""
        return self._capture.layers if "_capture" in vars(self) else []

    def _average(self, group: dist.ProcessGroup) -> None:
        is_lent = self.ranks is None or self.ranks.lender is not None
        if not is_lent and (is_claimed(self, Technique.COMPILE) or is_traced_to_operations()):
            raise GradweaveError(
                f"{type(self).__name__} averages vectors over ranks, which compile() does with mesh= only; give "
                "mesh=, or process_group=None if each rank trains a model of its own"
            )
        params = [p for group in self.param_groups for p in group["params"]]
        records = [self.state[p]["record"] for p in params if "record" in self.state[p]]
        # The comparison of replicas waits for the device, which a graph that is traced or captured must not.
        if not is_lent and not is_compiling() and not is_capturing(records[0].device):
            self._replica_check.check(group, params, records, self)
        average_records(records, group)

    def step_in_kernels(self, layers: list[Layer], others: list[ParameterInGroup]) -> bool:
        """Take a step of our own rule on a GPU, and return whether kernels support it."""
        fused: FusedStep | None = vars(self).get("_fused")
        return fused is not None and is_fusible(self.update_rule) and fused.take(self, layers, others)

    def find_direction(
        self, layer: Layer, gradient_square: torch.Tensor, factor: Number, keep: torch.Tensor
    ) -> Direction:
        """Blend the statistics into the running vectors, and return the direction."""
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
        if self.update_rule.momentum_first:
            square = gradient.square().sum() + (0.0 if bias_gradient is None else bias_gradient.square().sum())
            moves = (matrices(fresh, inputs.shape[0], columns_first=layer.columns_first) != 0).any(-1)
            if bias_fresh is not None:
                moves = moves | (bias_fresh.view(moves.shape) != 0)
        found = direction(
            self.update_rule,
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

    def _followed(self, fresh: torch.Tensor, state: ParameterState, group: ParameterGroup) -> torch.Tensor:
        """Return what a direction is taken of: the gradient, or the gradient with momentum's look-ahead."""
        if not self.update_rule.momentum_first:
            return fresh
        return look_ahead(fresh, state["momentum_buffer"].to(fresh.dtype), group["momentum"])

    def _blend(self, layer: Layer, factor: Number, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Blend a layer's record into its running vectors, reset it, and return the input and the output vector."""
        state = layer.state
        record, running = state["record"], state["input_vector"]
        count = record[running.numel()]
        fresh = keep & (count > 0) & torch.isfinite(record.sum())
        safe = torch.where(count > 0, count, torch.ones_like(count))
        weight = layer.group["running_average"]
        _blend_into(running, record[: running.numel()] / safe, weight, fresh)
        outputs = state.get("output_vector")
        if outputs is not None and self.update_rule.formula != LEADING:
            new = record[running.numel() + 1 :] * self._inverse_loss_scale()
            if new.numel() == 0:
                new = self._from_bias(layer, outputs, factor)
            new = new if self._options.per_sample else new / safe
            _blend_into(outputs, new.view(outputs.shape), weight, fresh)
        record.zero_()
        return running, outputs

    def _from_bias(self, layer: Layer, outputs: torch.Tensor, factor: Number) -> torch.Tensor:
        """Return the sum of outputs' gradients where no hook could see them: it is the bias' gradient."""
        if layer.bias_grad is None:
            return torch.zeros_like(outputs)
        return layer.bias_grad.view(outputs.shape).to(outputs.dtype) * factor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, and the statistics that were collected with them."""
        super().zero_grad(set_to_none)
        layers = self._layers()
        if layers:
            self._capture.forget()
        zero_all([layer.tap.record for layer in layers if layer.tap.record is not None])

    def _inverse_loss_scale(self) -> Number:
        """Return the factor that undoes the loss scale in output vectors; relative damping does not need their size."""
        return 1 / loss_scale(self) if self.needs_loss_scale else 1.0

    @property
    def needs_loss_scale(self) -> bool:
        """Whether a loss that is scaled without this optimizer's knowledge would change its updates."""
        return self._options.outputs and not self.update_rule.relative


def _blend_into(running: torch.Tensor, new: torch.Tensor, weight: Number, fresh: torch.Tensor) -> None:
    """Blend in place; the first vector is taken as it is."""
    new = new.view(running.shape)
    blended = torch.where((running != 0).any(), running + (new - running) * weight, new)
    running.copy_(torch.where(fresh, blended, running))


def matrices(grad: torch.Tensor, groups: int, *, columns_first: bool) -> torch.Tensor:
    """Return a weight's gradient as matrices: groups, rows, columns."""
    if columns_first:
        return grad.reshape(groups, grad.shape[0] // groups, -1).transpose(1, 2)
    return grad.reshape(groups, grad.shape[0] // groups, -1)


def _options_of(mode: Mode, samples: int | None, *, outputs: bool) -> StatisticsOptions:
    """Return the statistics that a mode needs; outputs' gradients only in the authors' modes."""
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise ArgumentError("samples", samples, "give at least 1, or None")
    if mode is Mode.REFERENCE:
        samples = samples or REFERENCE_SAMPLES
        return StatisticsOptions(outputs, samples, samples, per_sample=False)
    if mode is Mode.FAITHFUL:
        return StatisticsOptions(outputs, samples, samples)
    return StatisticsOptions(False, samples, words=False)


@with_shared_arguments(_ARGUMENTS)
class EvaF(_StatisticsOptimizer):
    """Eva-f: a layer's gradient times the damped inverse of its mean input's outer product.

    Needs nothing of backward but the gradient. By default the input vector is the whole batch's, and damping is
    relative to its size.
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
        first_order: FirstOrderRule | None = None,
        first_order_lr: float | None = None,
        first_order_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        process_group: dist.ProcessGroup | str | None = DEFAULT,
        faithful: bool = False,
        reference: bool = False,
    ) -> None:
        mode = Mode.of(faithful=faithful, reference=reference)
        given = Hyperparameters(
            lr=lr,
            damping=damping,
            momentum=momentum,
            weight_decay=weight_decay,
            running_average=running_average,
            kl_clip=kl_clip,
            first_order=first_order,
            first_order_lr=first_order_lr,
            first_order_weight_decay=first_order_weight_decay,
            betas=betas,
            eps=eps,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
        )
        rules = {
            Mode.OURS: UpdateRule(INPUTS),
            Mode.FAITHFUL: UpdateRule(INPUTS, **AUTHORS, divided=True, trust=KL_CLIP),
            Mode.REFERENCE: UpdateRule(INPUTS, **AUTHORS, trust=NORMALIZE),
        }
        options = _options_of(mode, samples, outputs=False)
        super().__init__(model, params, given.defaults(mode), rules[mode], options, process_group)


@with_shared_arguments(_ARGUMENTS)
class Eva(_StatisticsOptimizer):
    """Eva: preconditions from both sides, by vectors of inputs and of outputs.

    The published rule inverts one rank-one matrix for both sides together, which in practice leaves the gradient
    as it was, and its output vectors are zero before a BatchNorm. By default each side is damped by itself, and the
    output vector is the direction of outputs in which steps would be largest, found by one power iteration in each.

    Args:
        output_damping: Damping of the outputs' side, as a share of it; ``damping`` is that of the inputs' side. Not in
            the authors' modes, which have one damping for both.
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
        first_order: FirstOrderRule | None = None,
        first_order_lr: float | None = None,
        first_order_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        process_group: dist.ProcessGroup | str | None = DEFAULT,
        faithful: bool = False,
        reference: bool = False,
    ) -> None:
        mode = Mode.of(faithful=faithful, reference=reference)
        given = Hyperparameters(
            lr=lr,
            damping=damping,
            momentum=momentum,
            weight_decay=weight_decay,
            running_average=running_average,
            kl_clip=kl_clip,
            first_order=first_order,
            first_order_lr=first_order_lr,
            first_order_weight_decay=first_order_weight_decay,
            betas=betas,
            eps=eps,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
        )
        authors = UpdateRule(JOINT, **AUTHORS, divided=True, trust=KL_CLIP)
        rule = UpdateRule(LEADING) if mode is Mode.OURS else authors
        if not output_damping > 0:
            raise ArgumentError("output_damping", output_damping, "give a positive number")
        defaults = {**given.defaults(mode), "output_damping": output_damping}
        super().__init__(model, params, defaults, rule, _options_of(mode, samples, outputs=True), process_group)
