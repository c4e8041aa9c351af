"""The base of Eva, Eva-f and Eva-s: parameter groups, and a step in two phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast
from weakref import finalize

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradweave._compat.distributed import is_flattened_by_fsdp
from gradweave._compat.foreach import asked_by_grad_scaler
from gradweave._runtime.claims import PipelinePart, Technique, claim_model, claim_optimizer, is_claimed, pipeline_part
from gradweave._runtime.requirements import refuse_sharded
from gradweave._runtime.two_phase_step import Commit, TwoPhaseStep
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.optim import first_order
from gradweave.optim.averaging import Ranks
from gradweave.optim.hyperparameters import check_hyperparameters
from gradweave.optim.rules import (
    LAYER,
    LOCAL_TRUSTS,
    ROW,
    SIZED_TRUSTS,
    Direction,
    Number,
    UpdateRule,
    common_scale,
    local_scale,
    sum_of,
)
from gradweave.optim.state import (
    ADAMW,
    FIRST_ORDER_RULES,
    PRECISE_KEYS,
    VECTORS,
    FirstOrderRule,
    ParameterGroup,
    ParameterInGroup,
    ParameterState,
    wide_dtype,
)
from gradweave.optim.update import FirstOrderTarget, PreparedStep, Target, bias_term, times

ADAMW_RATIO = 0.05
"""AdamW's learning rate as a share of the vectors', unless it is given one."""

NO_HOOKS = (
    "this optimizer has no hooks on a model: it is a copy, or was detached; make one for the model, and load the state "
    "dict of this one"
)


@dataclass
class Layer:
    """A weight in a step, with its bias.

    Attributes:
        group: Its hyperparameters.
        weight: The weight.
        grad: Its gradient, which may be scaled.
        state: Its state.
        bias: The bias, if the layer has one that belongs to its matrices and has a gradient.
        bias_grad: The bias' gradient.
        bias_state: The bias' state.
        columns_first: Whether the weight is stored transposed.
    """

    group: ParameterGroup
    weight: torch.Tensor
    grad: torch.Tensor
    state: ParameterState
    bias: torch.Tensor | None = None
    bias_grad: torch.Tensor | None = None
    bias_state: ParameterState | None = None
    columns_first: bool = False


class VectorOptimizer(Optimizer):
    """An optimizer that preconditions layers by vectors, and updates other parameters by a first-order rule.

    Groups with the rule ``"vectors"`` hold weights, each followed by its bias if that is a column of it; other groups
    name their first-order rule. All decisions of a step are made on the device, and nothing waits for it.

    Implements :class:`~gradweave._runtime.two_phase_step.TwoPhaseStep`: whether a step is taken depends on all
    gradients, and fusion may defer the rest.

    Args:
        model: The model.
        params: Parameters, or groups of them, as from :func:`parameters_of`.
        defaults: As from :meth:`Hyperparameters.defaults`.
        update_rule: The rule of groups with vectors.
    """

    ranks: Ranks | None = None
    """The ranks over which statistics of backward are averaged; None where gradients are all that a step needs."""

    def __init__(
        self, model: nn.Module, params: Iterable[Any], defaults: dict[str, Any], update_rule: UpdateRule
    ) -> None:
        check_hyperparameters(defaults)
        self.update_rule = update_rule
        self._part = _pipeline_of(model, type(self).__name__, update_rule)
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
        """Whether a step undoes a loss scale by itself, as torch's GradScaler asks, which then passes the scale on.

        Only to GradScaler the answer is yes. Others that ask, such as Lightning, would conclude that gradients must not
        be unscaled or clipped before a step, with a scaler or without one; they may be.
        """
        return asked_by_grad_scaler()

    def covered(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return those of some parameters that have vectors, each weight followed by its bias."""
        raise NotImplementedError

    def prepare_layer(self, layer: Layer) -> None:
        """Create the state that a layer lacks."""
        raise NotImplementedError

    def find_direction(
        self, layer: Layer, gradient_square: torch.Tensor, factor: Number, keep: torch.Tensor
    ) -> Direction:
        """Blend new vectors into the running ones, and return the direction.

        Args:
            layer: The layer.
            gradient_square: The square of its gradient with the bias', after multiplication by the factor.
            factor: Factor of the gradient: the inverse loss scale, negative for maximizing.
            keep: Whether the step is taken.
        """
        raise NotImplementedError

    def prepare_size(self, layer: Layer) -> None:
        """Store the norm of a weight in its first step, where that measures the steps.

        It is not the current norm: steps that grow with a weight make it grow without bound. A weight of zeros gets a
        tenth of the root of its rows, so that it learns too.
        """
        if self.update_rule.trust in SIZED_TRUSTS and "size" not in layer.state:
            weight = layer.weight
            norm: torch.Tensor = torch.linalg.vector_norm(weight, dtype=wide_dtype(weight))
            layer.state["size"] = norm.clamp_min(0.1 * weight.shape[0] ** 0.5).view(1)

    def begin_step(self) -> None:
        """Do what comes before a step's computation.

        Called on a rank without any gradient too: other ranks may wait for it.
        """

    def step_in_kernels(self, layers: list[Layer], others: list[ParameterInGroup]) -> bool:  # noqa: ARG002
        """Take a step in kernels of our own, and return whether there are any for it."""
        return False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters: those that have vectors as one group, the others as another.

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
        """Raise ArgumentError unless a group's rule is known, and is one for its parameters."""
        known = (VECTORS, *FIRST_ORDER_RULES)
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
        """Load the result of ``state_dict()``; vectors keep their precision, whatever the parameters have."""
        # torch casts floating-point state to its parameter's precision: what is kept wider is copied once more.
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, own, strict=True):
            entry = state_dict["state"].get(index, {})
            for key in PRECISE_KEYS:
                if key in entry:
                    self.state[p][key] = entry[key].detach().clone().to(device=p.device, dtype=wide_dtype(p))
            if p.dtype == torch.float16 and "momentum_buffer" in entry:
                self.state[p]["momentum_buffer"] = entry["momentum_buffer"].detach().clone().to(p.device, torch.float32)
            if isinstance(entry.get("step"), torch.Tensor):
                self.state[p]["step"] = entry["step"].detach().clone().to(p.device)

    def _first_order_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return a group's hyperparameters for the first-order rule, with defaults for those that are not given."""
        defaults = self.defaults
        settings = dict(settings)
        if defaults["first_order_lr"] is not None:
            settings["lr"] = defaults["first_order_lr"]
        elif defaults["first_order"] == ADAMW:
            settings["lr_ratio"] = ADAMW_RATIO
        settings.setdefault("weight_decay", defaults["first_order_weight_decay"])
        return {**settings, "rule": defaults["first_order"]}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; a step in which any gradient is not finite changes nothing.

        Args:
            closure: Reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_parameters()
        layers, others = self._gather()
        if layers or others:
            with _no_autocast(_device_of(layers, others)):
                self._prepare(layers, others)
                # Kernels decide and write in one go: not under a fusion, which defers the writing, nor in a pipeline,
                # whose ranks decide together.
                apart = is_claimed(self, Technique.FUSE) or self._in_pipeline is not None
                if apart or not self.step_in_kernels(layers, others):
                    self._prepared(layers, others).commit()
        else:
            self._join_without_gradients()
        return loss

    @torch.no_grad()
    def prepare_step(self) -> Commit:
        """Do the first phase of a step: decide whether to take it, and find vectors, directions and scales.

        Returns:
            The commit of a two-phase step, for :func:`gradweave.fuse`.
        """
        groups = self.param_groups
        self.param_groups = [{key: _frozen(value) for key, value in group.items()} for group in groups]
        try:
            layers, others = self._gather()
        finally:
            self.param_groups = groups
        if not layers and not others:
            self._join_without_gradients()
            return lambda _: None
        with _no_autocast(_device_of(layers, others)):
            self._prepare(layers, others)
            return self._prepared(layers, others).commit

    @property
    def _in_pipeline(self) -> PipelinePart | None:
        """The pipeline whose ranks decide together whether to take a step; copies of an optimizer are in none."""
        # By vars(): copies and unpickled optimizers have torch's attributes only.
        part: PipelinePart | None = vars(self).get("_part")
        return part

    def _enlist(self) -> None:
        """Tell the other ranks of a pipeline, after everything else in the constructor has succeeded."""
        if self._part is not None:
            self._name = self._part.enlist()

    def _join_without_gradients(self) -> None:
        """Take part in the collectives of a step for which this rank has no gradient."""
        device = next((p.device for group in self.param_groups for p in group["params"]), None)
        if device is None:  # a fusion has hidden all parameters: prepare_step() follows, and takes part
            return
        self.begin_step()
        part = self._in_pipeline
        if part is not None:
            part.all_agree(self._name, torch.ones((), dtype=torch.bool, device=device))

    def _check_parameters(self) -> None:
        """Raise GradweaveError in a copy, and where groups hold only some of the parameters, as under another fusion.

        While a step is traced, other tensors stand for parameters; those of unused layers may be missing.
        """
        if "update_rule" not in vars(self):
            raise GradweaveError(NO_HOOKS)
        params = [p for group in self.param_groups for p in group["params"]]
        own = vars(self).get("_own_parameters", 0)
        if (
            len(params) < own
            and all(isinstance(p, nn.Parameter) for p in params)
            and any(p.grad is not None for p in params)
        ):
            raise GradweaveError(
                f"{type(self).__name__} updates all parameters in one step, or none if a gradient is not finite: "
                "give it all of them"
            )

    def _gather(self) -> tuple[list[Layer], list[ParameterInGroup]]:
        """Return what has a gradient: layers, and parameters for the first-order rule."""
        layers: list[Layer] = []
        others: list[ParameterInGroup] = []
        for group in cast("list[ParameterGroup]", self.param_groups):
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
                elif p.grad is not None and _is_shard(p, owner):
                    raise UnsupportedError(
                        "FSDP", "it has sharded weights since the optimizer was made", "train without FSDP"
                    )
                elif p.grad is not None and owner is not None:
                    owner.bias, owner.bias_grad, owner.bias_state = p, p.grad, self.state[p]
                elif p.grad is not None:
                    raise GradweaveError(
                        f"a bias of shape {tuple(p.shape)} has a gradient, and its layer's weight has none; freeze "
                        'both, or put the bias into a group with a "rule" of its own'
                    )
        return layers, others

    def _prepare(self, layers: list[Layer], others: list[ParameterInGroup]) -> None:
        """Create the state that is missing."""
        for layer in layers:
            self.prepare_layer(layer)
        for p, group in others:
            first_order.prepare(p, self.state[p], cast("FirstOrderRule", group["rule"]))

    def _prepared(self, layers: list[Layer], others: list[ParameterInGroup]) -> PreparedStep:
        """Return a step with everything computed but weights, momentum and the first-order rule's state."""
        inverse = self.inverse_loss_scale(_device_of(layers, others))
        squares = [_square(inverse, layer.grad, layer.bias_grad) for layer in layers]
        keep = self.may_step([*squares, *(_square(inverse, p.grad) for p, _ in others if p.grad is not None)])
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
        plain = [FirstOrderTarget(p, p.grad, self.state[p], group) for p, group in others if p.grad is not None]
        return PreparedStep(targets, plain, keep, inverse, self.update_rule)

    def _scales(self, layers: list[Layer], found: list[Direction]) -> list[torch.Tensor]:
        trust = self.update_rule.trust
        if trust in LOCAL_TRUSTS:
            return [
                local_scale(LAYER if trust == ROW and layer.columns_first else trust, one, _size(layer))
                for layer, one in zip(layers, found, strict=True)
            ]
        rates = [layer.group["lr"] for layer in layers]
        scale = common_scale(trust, found, rates, layers[0].group["kl_clip"])
        return [scale * one.factor for one in found]

    def may_step(self, squares: list[torch.Tensor]) -> torch.Tensor:
        """Return on the device whether the step may change anything: all gradients are finite, on all ranks.

        Args:
            squares: Squared norms of all gradients of this rank.
        """
        keep = torch.isfinite(sum_of([square.to(torch.float64) for square in squares]))
        found = getattr(self, "found_inf", None)
        if found is not None:
            keep = keep & (found.reshape(()).to(keep.device) == 0)
        part = self._in_pipeline
        return keep if part is None else part.all_agree(self._name, keep)

    def inverse_loss_scale(self, device: torch.device) -> Number:
        """Return the factor that undoes the loss scale of a GradScaler, which leaves that to the optimizer."""
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else scale.reshape(()).to(device).double().reciprocal().float()


if TYPE_CHECKING:
    _implemented: type[TwoPhaseStep] = VectorOptimizer


def _pipeline_of(model: nn.Module, of: str, rule: UpdateRule) -> PipelinePart | None:
    """Return the pipeline of several ranks that a model is in; raise UnsupportedError if the rule cannot be used there.

    Args:
        model: The model.
        of: The optimizer's class.
        rule: Its rule.
    """
    part = pipeline_part(model)
    if part is None or part.ranks == 1:
        return None
    if rule.trust not in LOCAL_TRUSTS:
        raise UnsupportedError(
            "a part of a Pipeline",
            f"{of} has one scale for all layers, which are on {part.ranks} ranks here",
            "use Eva, EvaF or EvaS without faithful and reference",
        )
    return part


def _device_of(layers: list[Layer], others: list[ParameterInGroup]) -> torch.device:
    return (layers[0].weight if layers else others[0][0]).device


def _frozen(value: Any) -> Any:
    """Return a hyperparameter that a scheduler no longer changes in place."""
    if isinstance(value, tuple):
        return tuple(_frozen(part) for part in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _targets(layer: Layer, found: Direction, scale: torch.Tensor, factor: Number) -> list[Target]:
    """Return the updates of a layer's weight and bias."""
    group, buffer = layer.group, layer.state["momentum_buffer"]
    own = _for(layer.weight, scale)
    weight = Target(
        layer.weight, layer.grad, buffer, group, factor, own, found.left * scale, found.right, layer.columns_first
    )
    if layer.bias is None or layer.bias_grad is None or layer.bias_state is None:
        return [weight]
    term = bias_term(found, scale, layer.bias)
    buffer = layer.bias_state["momentum_buffer"]
    return [weight, Target(layer.bias, layer.bias_grad, buffer, group, factor, _for(layer.bias, scale), term)]


def _for(p: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a scale that broadcasts with a parameter's gradient: one number, or one for each of its rows."""
    return scale.reshape(p.shape[0], *[1] * (p.dim() - 1)) if scale.dim() else scale


def _square(inverse: Number, grad: torch.Tensor, bias_grad: torch.Tensor | None = None) -> torch.Tensor:
    """Return the squared norm of a layer's gradient, without the loss scale.

    The scale may be so large that scaled gradients have no square in float32. By rows, as the other sums over the
    gradient, so that a compiler computes all of them in one pass.
    """
    wide = wide_dtype(grad)
    flat = grad.flatten(1) if grad.dim() > 1 else grad.reshape(1, -1)
    square: torch.Tensor = torch.linalg.vector_norm(times(flat.to(wide), inverse), dim=1).square().sum()
    if bias_grad is not None:
        square = square + torch.linalg.vector_norm(times(bias_grad.to(wide), inverse)).square()
    return square


def loss_scale(optimizer: Optimizer) -> Number:
    """Return the factor by which a GradScaler multiplied the loss, which statistics of backward still contain."""
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        return scale.reshape(())
    if getattr(optimizer, "found_inf", None) is not None:
        raise GradweaveError(
            "GradScaler.unscale_() does not tell an optimizer the scale that output vectors were collected with; call "
            "scaler.step() without it, or use the default rule, which needs no scale"
        )
    return 1.0


def _size(layer: Layer) -> torch.Tensor:
    """Return the norm that a layer's steps are proportional to."""
    size: torch.Tensor | None = layer.state.get("size")
    return torch.ones_like(layer.grad.new_zeros(()), dtype=wide_dtype(layer.grad)) if size is None else size.view(())


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a step's arithmetic is not cast, whatever surrounds it."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _is_shard(p: torch.Tensor, owner: Layer | None) -> bool:
    """Return whether a vector is a part of a weight that FSDP has flattened, and no bias.

    FSDP that shards nothing flattens a bias too, but leaves the weight before it a matrix.
    """
    return is_flattened_by_fsdp(p) and not (owner is not None and is_flattened_by_fsdp(owner.weight))


def parameters_of(model: nn.Module, params: Iterable[Any] | None) -> list[Any]:
    """Return the parameters or groups of an optimizer: those given, or all of a model's.

    Raises:
        ArgumentError: If an argument is not a model, or not parameters.
        UnsupportedError: If the model has lazy, complex or sharded parameters.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "give the model, and its parameters as params")
    name = type(model).__name__
    if any(is_lazy(p) for p in model.parameters()):
        raise UnsupportedError(name, "it has lazy layers", "run it once before making an optimizer")
    if any(p.is_complex() for p in model.parameters()):
        raise UnsupportedError(name, "it has complex parameters")
    refuse_sharded(model)
    if params is None:
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]
    if isinstance(params, (str, bytes, dict)) or not isinstance(params, Iterable):
        raise ArgumentError(
            "params", params, "give parameters, or groups of them; everything else by name, such as lr=0.1"
        )
    given = list(params)
    return given if given and isinstance(given[0], dict) else [{"params": given}]
