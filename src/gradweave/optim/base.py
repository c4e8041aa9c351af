"""What Eva, Eva-f and Eva-s have in common as optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradweave._compat.foreach import asked_by_grad_scaler
from gradweave._runtime.claims import PipelinePart, Technique, claim_model, claim_optimizer, is_claimed, pipeline_part
from gradweave._runtime.requirements import refuse_sharded
from gradweave._runtime.two_phase_step import Commit
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.optim import first_order
from gradweave.optim.averaging import Ranks
from gradweave.optim.deferred_step import Begun, Other, Plain
from gradweave.optim.hyperparameters import check_hyperparameters
from gradweave.optim.rules import (
    LAYER,
    LOCAL_TRUSTS,
    ROW,
    SIZED_TRUSTS,
    Direction,
    Manner,
    Number,
    common_scale,
    local_scale,
    sum_of,
)
from gradweave.optim.update import Target, column_of_bias, times, wide_dtype

ADAMW_RATIO = 0.05
"""AdamW's learning rate to the family's, unless it has one of its own."""

VECTORS = "vectors"
"""The rule of groups whose parameters have vectors."""


COPY = (
    "this optimizer has no hooks on a model: it is a copy, or was detached; make one for the model, and load the state "
    "dict of this one"
)
_PRECISE = ("record", "input_vector", "output_vector", "mode_vectors", "size", "exp_avg", "exp_avg_sq")
"""State that is not of its parameter's precision."""


@dataclass
class Layer:
    """A weight in a step, with the bias that is a column of it.

    Attributes:
        group: Its hyperparameters.
        weight: The weight.
        grad: Its gradient as it is, which may be scaled.
        state: Its state.
        bias: The bias, if there is one with a gradient.
        bias_grad: Its gradient.
        bias_state: Its state.
        columns_first: Whether the weight is stored transposed.
    """

    group: dict[str, Any]
    weight: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any]
    bias: torch.Tensor | None = None
    bias_grad: torch.Tensor | None = None
    bias_state: dict[str, Any] | None = None
    columns_first: bool = False


class VectorOptimizer(Optimizer):
    """Groups with the rule ``"vectors"``, and others that a first-order rule updates.

    A group of the former holds weights, each followed by its bias if that is a column of it. All
    decisions of a step are made on the device: nothing waits for it.
    """

    ranks: Ranks | None = None
    """Over which ranks what backward has caught is averaged; None where gradients hold all that a step needs."""

    def __init__(self, model: nn.Module, params: Iterable[Any], defaults: dict[str, Any], manner: Manner) -> None:
        check_hyperparameters(defaults)
        self.manner = manner
        self._part = _pipeline_of(model, type(self).__name__, manner)
        self._name = ""
        super().__init__(params, defaults)
        if self._part is None:
            claims = ExitStack()
            claim_model(model, Technique.EVA, self, claims)
            finalize(self, claims.close).atexit = False
            # Withdrawn with the optimizer: a callback would keep it alive.
            claim_optimizer(self, Technique.EVA, self, ExitStack())

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a step takes off a loss scale by itself, as torch's GradScaler asks, with the scale to hand it over.

        To others, Lightning for one, the answer would mean that gradients may neither be unscaled nor clipped before a
        step, scaler or not; they may.
        """
        return asked_by_grad_scaler()

    def covered(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those of some parameters that have vectors, each weight followed by its bias."""
        raise NotImplementedError

    def prepare_layer(self, layer: Layer) -> None:
        """Makes the state that a weight lacks."""
        raise NotImplementedError

    def find_direction(
        self, layer: Layer, gradient_square: torch.Tensor, factor: Number, keep: torch.Tensor
    ) -> Direction:
        """Blends new vectors into the running ones, and gives the direction.

        Args:
            layer: The layer.
            gradient_square: Of its gradient with the bias', multiplied by the factor.
            factor: What the gradient is to be multiplied by.
            keep: Whether the step is taken.
        """
        raise NotImplementedError

    def prepare_size(self, layer: Layer) -> None:
        """Notes the norm of a weight in its first step, where steps are measured by that.

        Not its norm of today: steps that grow with a weight make it grow without bound. A weight of zeros
        gets a tenth of the root of its rows, and learns too.
        """
        if self.manner.trust in SIZED_TRUSTS and "size" not in layer.state:
            weight = layer.weight
            norm: torch.Tensor = torch.linalg.vector_norm(weight, dtype=wide_dtype(weight))
            layer.state["size"] = norm.clamp_min(0.1 * weight.shape[0] ** 0.5).view(1)

    def begin_step(self) -> None:
        """Before anything of a step is computed; also where this rank has no gradient: others may wait for it."""

    def step_in_kernels(self, layers: list[Layer], others: list[Other]) -> bool:  # noqa: ARG002
        """Takes a step in kernels of its own, where there are any; False if there are none."""
        return False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters: those that have vectors as one group, the others as another.

        A group that names its ``rule`` is added as it is.
        """
        if not isinstance(param_group, dict):
            raise ArgumentError("param_group", type(param_group).__name__, "give a dict")
        check_hyperparameters({**self.defaults, **param_group})
        if param_group.get("rule") is not None:
            self._check_rule(param_group)
            super().add_param_group(param_group)
            self._own_parameters = sum(len(group["params"]) for group in self.param_groups)
            return
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        names = {id(p[1]): p[0] for p in params if isinstance(p, tuple)}
        tensors = [p[1] if isinstance(p, tuple) else p for p in params]
        covered = self.covered(tensors)
        inside = set(map(id, covered))
        rest = [p for p in tensors if id(p) not in inside]
        settings = {key: value for key, value in param_group.items() if key != "params"}

        def named(chosen: list[torch.Tensor]) -> list[Any]:
            return [(names[id(p)], p) for p in chosen] if names else chosen

        if covered:
            super().add_param_group({**settings, "params": named(covered), "rule": VECTORS})
        if rest:
            others = {**self._first_order_settings(settings), "params": named(rest)}
            super().add_param_group(others)
        self._own_parameters = sum(len(group["params"]) for group in self.param_groups)

    def _check_rule(self, group: dict[str, Any]) -> None:
        """Raises unless a group's rule is known, and is one for its parameters."""
        known = (VECTORS, *first_order.RULES)
        if group["rule"] not in known:
            raise ArgumentError("rule", group["rule"], f"use one of {', '.join(known)}")
        given = group["params"]
        group["params"] = given = [given] if isinstance(given, torch.Tensor) else list(given)
        if group["rule"] == VECTORS:
            params = [p[1] if isinstance(p, tuple) else p for p in given]
            starts = [place for place, p in enumerate(params) if p.dim() >= 2 or place == 0]
            layers = [params[start:end] for start, end in pairwise([*starts, len(params)])]
            if any(list(map(id, self.covered(layer))) != list(map(id, layer)) for layer in layers):
                raise ArgumentError(
                    "rule", VECTORS, "is for weights that have vectors, each followed by its bias; leave the rule out"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` gave; vectors keep their precision, whatever the parameters have."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, own, strict=True):
            entry = state_dict["state"].get(index, {})
            for key in _PRECISE:
                if key in entry:
                    self.state[p][key] = entry[key].detach().clone().to(device=p.device, dtype=wide_dtype(p))
            if p.dtype == torch.float16 and "momentum_buffer" in entry:
                self.state[p]["momentum_buffer"] = entry["momentum_buffer"].detach().clone().to(p.device, torch.float32)
            if isinstance(entry.get("step"), torch.Tensor):
                self.state[p]["step"] = entry["step"].detach().clone().to(p.device)

    def _first_order_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The hyperparameters of a group for the first-order rule: its own, where none are given."""
        defaults = self.defaults
        settings = dict(settings)
        if defaults["first_order_lr"] is not None:
            settings["lr"] = defaults["first_order_lr"]
        elif defaults["first_order"] == first_order.ADAMW:
            settings["lr_ratio"] = ADAMW_RATIO
        settings.setdefault("weight_decay", defaults["first_order_weight_decay"])
        return {**settings, "rule": defaults["first_order"]}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step; one in which any gradient is not finite changes nothing.

        Args:
            closure: Computes the loss anew.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_parts()
        layers, others = self._gather()
        if layers or others:
            with _no_autocast(_device_of(layers, others)):
                self._prepare(layers, others)
                apart = is_claimed(self, Technique.FUSE) or self._in_pipeline is not None
                if apart or not self.step_in_kernels(layers, others):
                    self._begin(layers, others).finish()
        else:
            self._go_along()
        return loss

    @torch.no_grad()
    def prepare_step(self) -> Commit:
        """Does at once what a step does with all gradients: whether to take it, vectors, directions and scales.

        Returns:
            What updates some of the parameters, with hyperparameters and gradients as they are now; for
            :func:`gradweave.fuse`, which has that done when they are needed.
        """
        groups = self.param_groups
        self.param_groups = [{key: _as_now(value) for key, value in group.items()} for group in groups]
        try:
            layers, others = self._gather()
        finally:
            self.param_groups = groups
        if not layers and not others:
            self._go_along()
            return lambda _: None
        with _no_autocast(_device_of(layers, others)):
            self._prepare(layers, others)
            return self._begin(layers, others).finish

    @property
    def _in_pipeline(self) -> PipelinePart | None:
        """Of what the model is a part, with which all is decided together; copies of an optimizer are of none."""
        part: PipelinePart | None = vars(self).get("_part")
        return part

    def _enlist(self) -> None:
        """Tells the other ranks of a pipeline, once all else of making an optimizer has gone well."""
        if self._part is not None:
            self._name = self._part.enlist()

    def _go_along(self) -> None:
        """Takes part in what other ranks do together in a step for which this one has no gradient."""
        self.begin_step()
        part = self._in_pipeline
        device = next((p.device for group in self.param_groups for p in group["params"]), None)
        if part is not None and device is not None:
            part.all_agree(self._name, torch.ones((), dtype=torch.bool, device=device))

    def _refuse_parts(self) -> None:
        """Raises if only some of the gradients are to be stepped with, as fusion would do it; and in a copy.

        Tensors that stand for parameters while a step is traced may be fewer: those of unused layers are missing.
        """
        if "manner" not in vars(self):
            raise GradweaveError(COPY)
        params = [p for group in self.param_groups for p in group["params"]]
        own = vars(self).get("_own_parameters", 0)
        if (
            len(params) < own
            and all(isinstance(p, nn.Parameter) for p in params)
            and any(p.grad is not None for p in params)
        ):
            raise GradweaveError(
                "updates all parameters in one step, or none if a gradient is not finite: give it all of them"
            )

    def _gather(self) -> tuple[list[Layer], list[Other]]:
        """What has a gradient: layers, and parameters for the first-order rule."""
        layers: list[Layer] = []
        others: list[Other] = []
        for group in self.param_groups:
            owner: Layer | None = None
            for p in group["params"]:
                if p.grad is not None and p.grad.is_sparse:
                    raise GradweaveError(
                        f"a gradient of a parameter of shape {tuple(p.shape)} is sparse; use sparse=False, or "
                        "torch.optim.SparseAdam for it"
                    )
                if group["rule"] != VECTORS:
                    if p.grad is not None:
                        others.append((p, group))
                elif p.dim() >= 2:
                    owner = None if p.grad is None else Layer(group, p, p.grad, self.state[p])
                    layers += [] if owner is None else [owner]
                elif p.grad is not None and owner is not None:
                    owner.bias, owner.bias_grad, owner.bias_state = p, p.grad, self.state[p]
                elif p.grad is not None:
                    raise GradweaveError(
                        f"a bias of shape {tuple(p.shape)} has a gradient, and its layer's weight has none; freeze "
                        'both, or put the bias into a group with a "rule" of its own'
                    )
        return layers, others

    def _prepare(self, layers: list[Layer], others: list[Other]) -> None:
        """Makes the state that is missing."""
        for layer in layers:
            self.prepare_layer(layer)
        for p, group in others:
            first_order.prepare(p, self.state[p], group["rule"])

    def _begin(self, layers: list[Layer], others: list[Other]) -> Begun:
        """All of a step but the writing of weights, momentum and the first-order rule's state."""
        inverse = self._inverse_scale(_device_of(layers, others))
        squares = [_square(inverse, layer.grad, layer.bias_grad) for layer in layers]
        keep = self._may_step([*squares, *(_square(inverse, p.grad) for p, _ in others)])
        self.begin_step()
        factors = [-inverse if layer.group["maximize"] else inverse for layer in layers]
        found = [
            self.find_direction(layer, square, factor, keep)
            for layer, square, factor in zip(layers, squares, factors, strict=True)
        ]
        targets: list[Target] = []
        if layers:
            for layer, one, scale, factor in zip(layers, found, self._scales(layers, found), factors, strict=True):
                targets += _targets(layer, one, torch.where(keep, scale, torch.zeros_like(scale)), factor)
        return Begun(targets, self._plain(others), keep, inverse, self.manner)

    def _plain(self, others: list[Other]) -> list[Plain]:
        return [Plain(p, p.grad, self.state[p], group) for p, group in others if p.grad is not None]

    def _scales(self, layers: list[Layer], found: list[Direction]) -> list[torch.Tensor]:
        trust = self.manner.trust
        if trust in LOCAL_TRUSTS:
            return [
                local_scale(LAYER if trust == ROW and layer.columns_first else trust, one, _size(layer))
                for layer, one in zip(layers, found, strict=True)
            ]
        rates = [layer.group["lr"] for layer in layers]
        scale = common_scale(trust, found, rates, layers[0].group["kl_clip"])
        return [scale * one.factor for one in found]

    def _may_step(self, squares: list[torch.Tensor]) -> torch.Tensor:
        """Whether the step may change anything, decided on the device: all gradients are finite."""
        keep = torch.isfinite(sum_of([square.to(torch.float64) for square in squares]))
        found = getattr(self, "found_inf", None)
        if found is not None:
            keep = keep & (found.reshape(()).to(keep.device) == 0)
        part = self._in_pipeline
        return keep if part is None else part.all_agree(self._name, keep)

    def _inverse_scale(self, device: torch.device) -> Number:
        """What gradients are to be multiplied by, under a GradScaler that leaves that to the optimizer."""
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else scale.reshape(()).to(device).double().reciprocal().float()


def _pipeline_of(model: nn.Module, of: str, manner: Manner) -> PipelinePart | None:
    """The pipeline of several ranks that a model is in.

    Args:
        model: The model.
        of: The optimizer's class.
        manner: Its rules.
    """
    part = pipeline_part(model)
    if part is None or part.ranks == 1:
        return None
    if manner.trust not in LOCAL_TRUSTS:
        raise ArgumentError(
            "model",
            "part of a Pipeline",
            f"{of} has one scale for all layers, which are on {part.ranks} ranks here; use Eva, EvaF or EvaS without "
            "faithful and reference",
        )
    return part


def _device_of(layers: list[Layer], others: list[Other]) -> torch.device:
    return (layers[0].weight if layers else others[0][0]).device


def _as_now(value: Any) -> Any:
    """A hyperparameter that nobody changes any more."""
    if isinstance(value, tuple):
        return tuple(_as_now(part) for part in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _targets(layer: Layer, found: Direction, scale: torch.Tensor, factor: Number) -> list[Target]:
    """A layer's weight and bias with what is to happen to them."""
    group, buffer = layer.group, layer.state["momentum_buffer"]
    own = _for(layer.weight, scale)
    weight = Target(layer.weight, layer.grad, buffer, group, factor, own, found.left * scale, found.right)
    weight.columns_first = layer.columns_first
    if layer.bias is None or layer.bias_grad is None or layer.bias_state is None:
        return [weight]
    column = column_of_bias(found, scale, layer.bias)
    buffer = layer.bias_state["momentum_buffer"]
    return [weight, Target(layer.bias, layer.bias_grad, buffer, group, factor, _for(layer.bias, scale), column)]


def _for(p: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A scale that a parameter's gradient can be multiplied by: one number, or one for each of its rows."""
    return scale.reshape(p.shape[0], *[1] * (p.dim() - 1)) if scale.dim() else scale


def _square(inverse: Number, grad: torch.Tensor | None, bias_grad: torch.Tensor | None = None) -> torch.Tensor:
    """The squared norm of a layer's gradient: by rows, as what else is read of it in that pass.

    Without the loss scale, which may be so large that scaled gradients have no square in float32.
    """
    if grad is None:
        raise TypeError("no gradient")
    wide = wide_dtype(grad)
    flat = grad.flatten(1) if grad.dim() > 1 else grad.reshape(1, -1)
    square: torch.Tensor = torch.linalg.vector_norm(times(flat.to(wide), inverse), dim=1).square().sum()
    if bias_grad is not None:
        square = square + torch.linalg.vector_norm(times(bias_grad.to(wide), inverse)).square()
    return square


def loss_scale(optimizer: Optimizer) -> Number:
    """What a GradScaler multiplied the loss by, which what was caught in backward still carries."""
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        return scale.reshape(())
    if getattr(optimizer, "found_inf", None) is not None:
        raise GradweaveError(
            "GradScaler.unscale_() does not tell an optimizer the scale that output vectors were caught with; call "
            "scaler.step() without it, or use the default rule, which needs no scale"
        )
    return 1.0


def _size(layer: Layer) -> torch.Tensor:
    """What a layer's steps are measured by."""
    size: torch.Tensor | None = layer.state.get("size")
    return torch.ones_like(layer.grad.new_zeros(()), dtype=wide_dtype(layer.grad)) if size is None else size.view(())


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def parameters_of(model: nn.Module, params: Iterable[Any] | None) -> list[Any]:
    """The parameters or groups an optimizer gets: those given, or all of a model's."""
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "give the model, and its parameters as params")
    if any(is_lazy(p) for p in model.parameters()):
        raise ArgumentError("model", type(model).__name__, "has lazy layers; run it once before making an optimizer")
    if any(p.is_complex() for p in model.parameters()):
        raise ArgumentError("model", type(model).__name__, "has complex parameters, which are not supported")
    refuse_sharded(model)
    if params is None:
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]
    if isinstance(params, (str, bytes, dict)) or not isinstance(params, Iterable):
        raise ArgumentError(
            "params", params, "give parameters, or groups of them; all else by its name, such as lr=0.1"
        )
    given = list(params)
    return given if given and isinstance(given[0], dict) else [{"params": given}]
