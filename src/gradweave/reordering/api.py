"""``reorder()``: weight gradients out of order, under an unchanged training loop."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradweave._compat.eager import (
    ConvolutionModule,
    has_backward_hooks,
    is_being_traced,
    is_parametrized,
)
from gradweave._logging import announce
from gradweave._runtime.attachment import Attachment
from gradweave._runtime.claims import Technique, claim_model, is_claimed
from gradweave._runtime.composition import refuse_conflicts
from gradweave._runtime.fused_updates import is_deferred_in_graph, updated_in_backward, updated_in_forward
from gradweave._runtime.module_hook import ModuleHook
from gradweave._runtime.optimizer_steps.hooks import stack_depth
from gradweave._runtime.requirements import (
    refuse_compiled,
    refuse_copies,
    refuse_sharded,
    require_module,
    require_one_device,
)
from gradweave._runtime.split_calls.queue import InLine, Place, WeightGradientQueue
from gradweave._runtime.split_calls.queued_calls import QueuedCalls
from gradweave._runtime.split_calls.shared_nodes import SharedTaps
from gradweave._runtime.split_calls.task import Recorder
from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.reordering.auto import Trial, predicted
from gradweave.reordering.cross_step import Crossing, Weights
from gradweave.reordering.executor import Planned, crossing_in, turns_of
from gradweave.reordering.lanes import Beside
from gradweave.reordering.with_fusion import Following
from gradweave.schedule.builders import single
from gradweave.schedule.costs import Costs
from gradweave.schedule.policies import PolicyName, plan

POLICIES = ("auto", "side_stream", "joint", "cross_step")
_PLANNED = ("joint", "cross_step")


def reorder(
    model: nn.Module,
    policy: str = "auto",
    *,
    byte_budget: int | None = None,
    costs: Costs | None = None,
) -> Reordering:
    """Takes the weight gradients of linear and convolution layers out of the chain of backward.

    Gradients are bit for bit the stock ones, and all there when ``backward()`` returns, or with
    ``"cross_step"`` when they are looked at. Where a weight is used three times or more, outside of the model's
    forward too or by unusual operations, the order of summing up may differ.

    Args:
        model: Whose layers; those inside of ``torch.utils.checkpoint`` stay in order.
        policy: ``"side_stream"`` computes them on a second stream, beside the input gradients; on the CPU,
            behind them. ``"joint"`` computes there only those that gain from it, where they gain most.
            ``"cross_step"`` does that too, and leaves some for the next forward, up to their weight's
            update; it needs ``fuse(model, optimizer, mode="forward")``. ``"auto"`` finds out whether it pays
            and leaves the step alone where it does not: with ``costs`` by what they predict, without by
            trying it over the first steps. On a CPU, which has no second stream, it installs nothing.
        byte_budget: Bytes that weight gradients which are not finished may keep alive; beyond it, the
            oldest are waited for. None for no bound.
        costs: What :func:`~gradweave.profile.measure_costs` says of the model; ``"joint"`` and
            ``"cross_step"`` need it.

    Returns:
        A handle that detaches; also a context manager that does so at its end.
    """
    if policy not in POLICIES:
        raise ArgumentError("policy", policy, f"use one of {', '.join(POLICIES)}")
    if byte_budget is not None and byte_budget < 0:
        raise ArgumentError("byte_budget", byte_budget, "give 0 or more bytes, or None for no bound")
    if costs is None and policy in _PLANNED:
        raise ArgumentError("costs", costs, f'give those of measure_costs(), by which policy="{policy}" plans')
    if costs is not None and policy == "side_stream":
        raise ArgumentError("costs", costs.name, f'policy="{policy}" plans nothing; leave them out, or use "joint"')
    device = _check_model(model, policy)
    if policy == "auto":
        return _attach_where_it_pays(model, device, byte_budget, costs)
    beside: Place = Beside(device) if device.type == "cuda" else InLine()
    if costs is None:
        return Reordering(model, beside, byte_budget, why=f"policy={policy!r}")
    return _attach_planned(model, beside, byte_budget, costs, policy, f"policy={policy!r}")


def split_in_order(model: nn.Module) -> Reordering:
    """Split off weight gradients but run each at its place in stock order, so that recorders see them apart."""
    return Reordering(model, Planned(InLine(), ()), None)


def _check_model(model: nn.Module, policy: str) -> torch.device:
    """Raises for models that cannot be reordered; returns the device of the others."""
    require_module(model)
    params = list(model.parameters())
    if not params:
        raise UnsupportedError(type(model).__name__, "it has no parameters", "give a model that has layers")
    require_one_device(params)
    refuse_copies(model)
    refuse_compiled(model, remedy="give the plain model, and compile it afterwards")
    averaged = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())
    if policy == "cross_step" and averaged:
        raise ArgumentError(
            "policy", policy, 'DDP averages all gradients before backward() returns; use policy="joint"'
        )
    refuse_conflicts(Technique.REORDER, model=model)
    refuse_sharded(model)
    if policy == "cross_step" and not updated_in_forward(model):
        raise ArgumentError(
            "policy",
            policy,
            "lets weight gradients wait for the next forward, where their updates must be too; "
            'call fuse(model, optimizer, mode="forward") before',
        )
    return params[0].device


def _attach_where_it_pays(
    model: nn.Module, device: torch.device, byte_budget: int | None, costs: Costs | None
) -> Reordering:
    if device.type != "cuda":
        why = "policy='auto': the step is left alone: a CPU has no second stream, and splitting costs time"
        return _leave_alone(model, byte_budget, why)
    if costs is None:
        return Reordering(model, Beside(device), byte_budget, trial=Trial(device))
    pays, reason = predicted(costs)
    if not pays:
        return _leave_alone(model, byte_budget, f"policy='auto': the step is left alone: {reason}")
    return _attach_planned(model, Beside(device), byte_budget, costs, "joint", f"policy='auto', joint: {reason}")


def _leave_alone(model: nn.Module, byte_budget: int | None, why: str) -> Reordering:
    announce(f"reorder: {why}")
    return Reordering(model, None, byte_budget, why=why)


def _attach_planned(
    model: nn.Module, beside: Place, byte_budget: int | None, costs: Costs, policy: str, why: str
) -> Reordering:
    """Carries out what a policy of the scheduler makes of measured costs; bytes are bounded by the queue."""
    layers = _layers(model)
    number_of = {name: number for number, name in enumerate(layer_names(model))}
    layer_of = {index: number_of[layer.name] for index, layer in enumerate(costs.layers) if layer.name in number_of}
    layer_of = {index: number for index, number in layer_of.items() if layers[number].has_turns}
    if not layer_of:
        raise ArgumentError("costs", costs.name, "has no layer of this model; measure the model that is reordered")
    schedule = plan(single(costs), policy=cast(PolicyName, policy))
    fused = updated_in_forward(model) if policy == "cross_step" else frozenset()
    crossing = frozenset(
        number
        for number in (crossing_in(schedule, layer_of) if fused else ())
        if all(id(p) in fused for p in layers[number].module.parameters(recurse=False))
    )
    return Reordering(model, Planned(beside, turns_of(schedule, layer_of)), byte_budget, crossing=crossing, why=why)


class _Layer(NamedTuple):
    """A module with a weight that is used in a linear or convolution call, and the names that it has there."""

    name: str
    module: nn.Module
    weight: str = "weight"
    bias: str = "bias"

    @property
    def has_turns(self) -> bool:
        """Whether its gradients can have a place in a plan: attention to another uses parts of its weight instead."""
        return self.weight == "weight"


def _layers(model: nn.Module) -> list[_Layer]:
    """The layers whose gradients are to come last, in the order of the model."""
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, ConvolutionModule)):
            layers.append(_Layer(name, module))
        elif _has_joint_projection(module):
            layers.append(_Layer(name, module, "in_proj_weight", "in_proj_bias"))
    return layers


def _has_joint_projection(module: nn.Module) -> bool:
    if not isinstance(module, nn.MultiheadAttention) or is_parametrized(module):
        return False
    return isinstance(getattr(module, "in_proj_weight", None), nn.Parameter)


def layer_names(model: nn.Module) -> list[str]:
    """The layers' names by their numbers, as a cost file has them."""
    return [layer.name or type(model).__name__ for layer in _layers(model)]


def is_reordered(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, is reordered."""
    return is_claimed(model, Technique.REORDER)


class Reordering(Attachment):
    """What :func:`reorder` returns: a hold on the attachment.

    Args:
        model: Whose layers are split.
        place: Where their weight gradients run; None to attach nothing.
        byte_budget: As for :func:`reorder`.
        crossing: Layers whose gradients may wait for the next forward.
        trial: Finds out whether it pays, and says when to split meanwhile.
        why: What is said of it.
    """

    def __init__(
        self,
        model: nn.Module,
        place: Place | None,
        byte_budget: int | None,
        *,
        crossing: frozenset[int] = frozenset(),
        trial: Trial | None = None,
        why: str = "",
    ) -> None:
        self._queue = WeightGradientQueue(place or InLine(), byte_budget)
        self._taps = SharedTaps(self._queue)
        in_graph = partial(is_deferred_in_graph, model)
        self._crossing = Crossing(self._queue, crossing, in_graph) if crossing else None
        self._find_fusions = partial(updated_in_backward, model) if not crossing else dict
        self._fusions = self._find_fusions()
        self._following = Following(self._queue, self._takes_late) if self._fusions else None
        self._trial = trial
        self._why = why
        self._layers = _layers(model)
        self._own = _Own()
        self._open: WeakSet[QueuedCalls] = WeakSet()
        self._detached = False
        self._hooks: list[RemovableHandle] = []
        self._claims = ExitStack()
        if place is not None:
            try:
                self._attach(model)
            except BaseException:
                self.detach()
                raise

    def _attach(self, model: nn.Module) -> None:
        """The hook behind a forward is the last."""
        if self._following is not None:
            wait = ModuleHook(lambda *_: self._following.wait())  # type: ignore[union-attr]
            self._hooks.append(model.register_load_state_dict_pre_hook(wait))
        self._hooks.append(model.register_forward_pre_hook(ModuleHook(self._enter), prepend=True))
        self._hooks.append(model.register_forward_hook(_Leave(self._leave), always_call=True))
        claim_model(model, Technique.REORDER, self, self._claims)

    @property
    def is_attached(self) -> bool:
        """Whether it has not been detached."""
        return not self._detached

    @property
    def most_bytes_held(self) -> int:
        """The most bytes that unfinished weight gradients have kept alive at once."""
        return self._queue.most_held

    def explain(self) -> str:
        """What is done, and why."""
        if self._detached:
            return "detached: stock order"
        if self._trial is not None:
            return f"policy='auto': {self._trial.describe()}"
        crossing = f"; {len(self._crossing.layers)} layers may cross into the next forward" if self._crossing else ""
        attached = any(fusion.is_attached for fusion in self._fusions.values())
        following = "; updates follow their weight gradients" if attached else ""
        return self._why + crossing + following

    def record(self, recorder: Recorder | None) -> None:
        """Runs each weight gradient inside ``recorder(layer)``, for timelines; None ends it."""
        self._queue.recorder = recorder

    def detach(self) -> None:
        """Lets go: what the model runs from now on is stock."""
        self._detached = True
        self._claims.close()
        for late in (self._crossing, self._following):
            if late is not None:
                late.close()
        for calls in self._open:
            calls.closed = True
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        """All at once but the last, which is removed when every forward that is under way has come to it."""
        for hook in self._hooks[: None if not self._open else -1]:
            hook.remove()

    def _enter(self, *_: Any) -> None:
        if is_being_traced():
            return
        depth = stack_depth()
        while self._own.forwards and self._own.forwards[-1][0] >= depth:
            self._close()
        if self._trial is not None and torch.is_grad_enabled():
            self._trial.begin_forward()
        stack = ExitStack()
        calls = None
        if self._trial is None or self._trial.splits:
            weights = self._weights()
            followed = self._followed(weights)
            if self._crossing is not None:
                self._crossing.begin_forward(weights)
            if self._following is not None:
                self._following.begin_forward({number: weights[number] for number in followed})
            if torch.is_grad_enabled():  # torch's fast ways of evaluating are not taken where anybody looks on
                calls = QueuedCalls(self._queue, weights, followed, self._taps)
                stack.enter_context(calls)
                self._open.add(calls)
        self._own.forwards.append((depth, calls, stack))

    def _leave(self, output: Any) -> None:
        if is_being_traced():
            return
        if self._own.forwards:
            self._close()
        if self._trial is not None and torch.is_grad_enabled():
            self._trial.end_forward(output)
        if self._detached:
            self._remove_hooks()

    def _close(self) -> None:
        _, calls, stack = self._own.forwards.pop()
        if calls is not None:
            calls.closed = True
            self._open.discard(calls)
        stack.close()

    def _weights(self) -> Weights:
        """Those that can be read without computing them, by number; others have their gradients in stock order."""
        weights: dict[int, Any] = {}
        for number, layer in enumerate(self._layers):
            if is_parametrized(layer.module):
                continue
            weight, bias = getattr(layer.module, layer.weight), getattr(layer.module, layer.bias)
            if _is_plain(weight) and (bias is None or _is_plain(bias)):
                weights[number] = weight, bias
        return weights

    def _followed(self, weights: Weights) -> set[int]:
        """The layers whose updates come in backward, right behind their gradients.

        Not those with hooks in backward, which might look at a weight that is being updated, and not those that share
        one of weight and bias with another: autograd adds all of its gradients up first.
        """
        if self._following is None:
            return set()
        if not self._fusions or not all(fusion.is_attached for fusion in self._fusions.values()):
            self._fusions = self._find_fusions()
        pairs: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for weight, bias in weights.values():
            for p in (weight, bias):
                pairs[id(p)].add((id(weight), id(bias)))
        return {
            number
            for number, pair in weights.items()
            if all(p is None or (id(p) in self._fusions and len(pairs[id(p)]) == 1) for p in pair)
            and not has_backward_hooks(self._layers[number].module)
        }

    def _takes_late(self, p: torch.Tensor) -> bool:
        fusion = self._fusions.get(id(p))
        return fusion is not None and fusion.takes_late(p)


def _is_plain(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and not nn.parameter.is_lazy(weight)


class _Own(threading.local):
    """The forwards that a thread is in: how deep in the stack, and their contexts.

    One that was left by an interrupt, which no hook hears of, is found by its depth at the next.
    """

    def __init__(self) -> None:
        self.forwards: list[tuple[int, QueuedCalls | None, ExitStack]] = []


class _Leave(ModuleHook):
    """A hook behind a forward that is given what the forward returns; None if it has failed."""

    def __init__(self, callback: Callable[[Any], None]) -> None:
        super().__init__()
        self._with_output = callback

    def __call__(self, module: nn.Module, args: Any = (), *output: Any) -> None:  # noqa: ARG002
        """As torch calls it."""
        self._with_output(output)
