"""``reorder()``: weight gradients out of order, under an unchanged training loop."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum, auto
from functools import partial
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradweave._compat.functions import is_being_traced
from gradweave._compat.modules import ConvolutionModule, has_backward_hooks, is_parametrized
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
from gradweave._runtime.split_calls.queue import InlineLane, Lane, WeightGradientQueue
from gradweave._runtime.split_calls.queued_calls import QueuedCalls
from gradweave._runtime.split_calls.shared_nodes import SharedNodes, Weights
from gradweave._runtime.split_calls.task import Recorder
from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.reordering.auto import Choice, Trial, predicted
from gradweave.reordering.cross_step import CrossStepDeferral
from gradweave.reordering.executor import (
    PlannedLane,
    PlannedPolicy,
    crossing_in,
    plan_within_budget,
    turns_of,
)
from gradweave.reordering.lanes import SideStreamLane
from gradweave.reordering.with_fusion import FusedUpdateDeferral
from gradweave.schedule.costs import Costs

Policy = Literal["auto", "side_stream", "joint", "cross_step"]


def reorder(
    model: nn.Module,
    policy: Policy = "auto",
    *,
    byte_budget: int | None = None,
    costs: Costs | None = None,
) -> Reordering:
    """Take the weight gradients of linear and convolution layers out of the chain of backward.

    Gradients are the stock ones, bit for bit, and complete when ``backward()`` returns, or with ``"cross_step"`` when
    they are read. Where a weight is used three times or more, outside of the model's forward too or by unusual
    operations, they may be summed up in another order.

    Args:
        model: The model; layers inside of ``torch.utils.checkpoint`` stay in order.
        policy: ``"side_stream"`` computes weight gradients on a second stream beside the input gradients; on a CPU,
            after them. ``"joint"`` computes there only those that gain from it, where they gain most. ``"cross_step"``
            also leaves some for the next forward, up to the update of their weight; it needs
            ``fuse(model, optimizer, mode="forward")``. ``"auto"`` keeps stock order unless another one pays: with
            ``costs`` it decides by what they predict, else by a trial over the first steps. On a CPU, which has no
            second stream, it attaches nothing.
        byte_budget: Most bytes that unfinished weight gradients may keep alive. Plans stay within it; beyond it, the
            oldest are waited for. None for no bound.
        costs: Costs of the model from :func:`~gradweave.profile.measure_costs`, which ``"joint"`` and ``"cross_step"``
            need.

    Returns:
        A handle that detaches; also a context manager that detaches at its end.
    """
    if policy not in get_args(Policy):
        raise ArgumentError("policy", policy, f"use one of {', '.join(get_args(Policy))}")
    if byte_budget is not None and byte_budget < 0:
        raise ArgumentError("byte_budget", byte_budget, "give 0 or more bytes, or None for no bound")
    if costs is None and policy in get_args(PlannedPolicy):
        raise ArgumentError("costs", costs, f'give those of measure_costs(), by which policy="{policy}" plans')
    if costs is not None and policy == "side_stream":
        raise UnsupportedError(
            f"costs of {costs.name!r}", f'policy="{policy}" plans nothing', 'leave them out, or use policy="joint"'
        )
    device = _check_model(model, policy)
    if policy == "auto":
        return _attach_where_it_pays(model, device, byte_budget, costs)
    lane: Lane = SideStreamLane(device) if device.type == "cuda" else InlineLane()
    if policy == "side_stream" or costs is None:
        return Reordering(model, lane, byte_budget, why=f"policy={policy!r}")
    return _attach_planned(model, lane, byte_budget, costs, policy, f"policy={policy!r}")


def split_in_order(model: nn.Module) -> Reordering:
    """Split off weight gradients but run each at its place in stock order, so that recorders see them apart."""
    return Reordering(model, PlannedLane(InlineLane(), ()), None)


def _check_model(model: nn.Module, policy: Policy) -> torch.device:
    """Return the device of a model; raise GradweaveError if the model cannot be reordered."""
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
            "defers weight gradients into the next forward, and so their updates; "
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
        return Reordering(model, SideStreamLane(device), byte_budget, trial=Trial(device))
    pays, reason = predicted(costs, byte_budget)
    if not pays:
        return _leave_alone(model, byte_budget, f"policy='auto': the step is left alone: {reason}")
    return _attach_planned(
        model, SideStreamLane(device), byte_budget, costs, "joint", f"policy='auto', joint: {reason}"
    )


def _leave_alone(model: nn.Module, byte_budget: int | None, why: str) -> Reordering:
    announce(f"reorder: {why}")
    return Reordering(model, None, byte_budget, why=why)


def _attach_planned(
    model: nn.Module, lane: Lane, byte_budget: int | None, costs: Costs, policy: PlannedPolicy, why: str
) -> Reordering:
    """Carry out the schedule that a policy makes of measured costs."""
    layers = _layers(model)
    number_of = {name: number for number, name in enumerate(layer_names(model))}
    layer_of = {index: number_of[layer.name] for index, layer in enumerate(costs.layers) if layer.name in number_of}
    layer_of = {index: number for index, number in layer_of.items() if layers[number].has_turns}
    if not layer_of:
        raise UnsupportedError(
            f"costs of {costs.name!r}", "they have no layer of this model", "measure the model that is reordered"
        )
    schedule = plan_within_budget(costs, policy, byte_budget)
    fused = updated_in_forward(model) if policy == "cross_step" else frozenset()
    crossing = frozenset(
        number
        for number in (crossing_in(schedule, layer_of) if fused else ())
        if all(id(p) in fused for p in layers[number].module.parameters(recurse=False))
    )
    return Reordering(model, PlannedLane(lane, turns_of(schedule, layer_of)), byte_budget, crossing=crossing, why=why)


class _Layer(NamedTuple):
    """A module with a weight that is used in a linear or convolution call, and the names of weight and bias there."""

    name: str
    module: nn.Module
    weight: str = "weight"
    bias: str = "bias"

    @property
    def has_turns(self) -> bool:
        """Whether a plan may give its gradients a turn: an attention may use parts of its weight in several calls."""
        return self.weight == "weight"


def _layers(model: nn.Module) -> list[_Layer]:
    """Return the layers whose gradients come last, in the order of the model."""
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
    """Return the names of the layers by their numbers, as a cost file has them."""
    return [layer.name or type(model).__name__ for layer in _layers(model)]


def is_reordered(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, is reordered."""
    return is_claimed(model, Technique.REORDER)


class ReorderingState(Enum):
    """The states of a :class:`Reordering`.

    ========== ====================================================== ==============================
    state      meaning                                                next states
    ========== ====================================================== ==============================
    TRYING     stock order and split layers take turns                ATTACHED, LEFT_ALONE; as below
    ATTACHED   forwards split layers                                  DETACHING, DETACHED
    LEFT_ALONE forwards are stock: splitting does not pay             DETACHING, DETACHED
    DETACHING  detached, with a forward under way that must be left   DETACHED
    DETACHED   nothing of it is left on the model                     none
    ========== ====================================================== ==============================
    """

    TRYING = auto()
    ATTACHED = auto()
    LEFT_ALONE = auto()
    DETACHING = auto()
    DETACHED = auto()


class Reordering(Attachment):
    """The attachment that :func:`reorder` returns.

    Args:
        model: The model whose layers are split.
        lane: Runs their weight gradients; None to attach nothing.
        byte_budget: As for :func:`reorder`.
        crossing: Layers whose gradients may cross into the next forward.
        trial: Finds out whether splitting pays, and decides about each forward meanwhile.
        why: Explanation of what is done.
    """

    def __init__(
        self,
        model: nn.Module,
        lane: Lane | None,
        byte_budget: int | None,
        *,
        crossing: frozenset[int] = frozenset(),
        trial: Trial | None = None,
        why: str = "",
    ) -> None:
        self._queue = WeightGradientQueue(lane or InlineLane(), byte_budget)
        self._nodes = SharedNodes(self._queue)
        in_graph = partial(is_deferred_in_graph, model)
        self._cross_step_deferral = CrossStepDeferral(self._queue, crossing, in_graph) if crossing else None
        self._find_fusions = partial(updated_in_backward, model) if not crossing else dict
        self._fusions = self._find_fusions()
        self._fused_deferral = FusedUpdateDeferral(self._queue, self._takes_late) if self._fusions else None
        self._state = ReorderingState.LEFT_ALONE if lane is None else ReorderingState.ATTACHED
        self._trial = trial
        if trial is not None:
            self._state = ReorderingState.TRYING
            trial.decided = self._trial_decided
        self._why = why
        self._layers = _layers(model)
        self._own = _OpenForwards()
        self._contexts: WeakSet[QueuedCalls] = WeakSet()
        self._hooks: list[RemovableHandle] = []
        self._claims = ExitStack()
        if lane is not None:
            try:
                self._attach(model)
            except BaseException:
                self.detach()
                raise

    def _attach(self, model: nn.Module) -> None:
        if self._fused_deferral is not None:
            wait = ModuleHook(lambda *_: self._fused_deferral.wait())  # type: ignore[union-attr]
            self._hooks.append(model.register_load_state_dict_pre_hook(wait))
        self._hooks.append(model.register_forward_pre_hook(ModuleHook(self._enter), prepend=True))
        # The last one: a detach in mid-forward leaves it, to close the contexts that are open.
        self._hooks.append(model.register_forward_hook(_ForwardEndHook(self._leave), always_call=True))
        claim_model(model, Technique.REORDER, self, self._claims)

    def _trial_decided(self, chosen: Choice) -> None:
        if self._state is ReorderingState.TRYING:
            self._state = ReorderingState.LEFT_ALONE if chosen == "stock" else ReorderingState.ATTACHED

    @property
    def state(self) -> ReorderingState:
        """What is being done to the model."""
        return self._state

    @property
    def is_attached(self) -> bool:
        """Whether the attachment is in force."""
        return self._state not in (ReorderingState.DETACHING, ReorderingState.DETACHED)

    @property
    def most_bytes_held(self) -> int:
        """Most bytes that unfinished weight gradients have kept alive at once."""
        return self._queue.peak_bytes

    def explain(self) -> str:
        """Return what is done, and why."""
        if not self.is_attached:
            return "detached: stock order"
        if self._trial is not None:
            return f"policy='auto': {self._trial.describe()}"
        deferral = self._cross_step_deferral
        crossing = f"; {len(deferral.layers)} layers may cross into the next forward" if deferral else ""
        fused = any(fusion.is_attached for fusion in self._fusions.values())
        following = "; updates follow their weight gradients" if fused else ""
        return self._why + crossing + following

    def record(self, recorder: Recorder | None) -> None:
        """Run each weight gradient inside ``recorder(layer)``, for timelines; None ends that."""
        self._queue.recorder = recorder

    def detach(self) -> None:
        """Finish what is deferred, and let go: what the model runs from now on is stock."""
        self._state = ReorderingState.DETACHING
        self._claims.close()
        for deferral in (self._cross_step_deferral, self._fused_deferral):
            if deferral is not None:
                deferral.close()
        for context in self._contexts:
            context.is_closed = True
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        """Remove all hooks, the last only when every forward that is under way has come to it."""
        for hook in self._hooks[: None if not self._contexts else -1]:
            hook.remove()
        if not self._contexts:
            self._state = ReorderingState.DETACHED

    def _enter(self, *_: Any) -> None:
        if is_being_traced():  # a graph of the model is recorded: it is to be the stock model's
            return
        # Torch calls no hook after a KeyboardInterrupt, so the innermost forward noted here may be one that was left. A
        # counter cannot tell that from one that is around this forward; the depth can: only the latter is shallower.
        depth = stack_depth()
        while self._own.forwards and self._own.forwards[-1].depth >= depth:
            self._close()
        if self._trial is not None and torch.is_grad_enabled():
            self._trial.begin_forward()
        stack = ExitStack()
        context = None
        if self._trial is None or self._trial.splits:
            weights = self._weights()
            followed = self._followed(weights)
            if self._cross_step_deferral is not None:
                self._cross_step_deferral.begin_forward(weights)
            if self._fused_deferral is not None:
                self._fused_deferral.begin_forward({number: weights[number] for number in followed})
            if torch.is_grad_enabled():  # under a torch-function mode, torch's fast paths of evaluation are not taken
                context = QueuedCalls(self._queue, weights, followed, self._nodes)
                stack.enter_context(context)
                self._contexts.add(context)
        self._own.forwards.append(_OpenForward(depth, context, stack))

    def _leave(self, output: Any) -> None:
        if is_being_traced():
            return
        if self._own.forwards:
            self._close()
        if self._trial is not None and torch.is_grad_enabled():
            self._trial.end_forward(output)
        if not self.is_attached:
            self._remove_hooks()

    def _close(self) -> None:
        forward = self._own.forwards.pop()
        if forward.context is not None:
            forward.context.is_closed = True
            self._contexts.discard(forward.context)
        forward.stack.close()

    def _weights(self) -> Weights:
        """Return weights and biases by layer, without those that are computed: their gradients stay in stock order."""
        weights: dict[int, Any] = {}
        for number, layer in enumerate(self._layers):
            if is_parametrized(layer.module):
                continue
            weight, bias = getattr(layer.module, layer.weight), getattr(layer.module, layer.bias)
            if _is_plain(weight) and (bias is None or _is_plain(bias)):
                weights[number] = weight, bias
        return weights

    def _followed(self, weights: Weights) -> set[int]:
        """Return the layers whose updates come in backward, right after their gradients.

        Not those with hooks in backward, which might read a weight that is being updated, and not those that share only
        one of weight and bias with another: autograd adds all of its gradients up first.
        """
        if self._fused_deferral is None:
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


class _OpenForward(NamedTuple):
    """A forward that is under way.

    Attributes:
        depth: Depth of its hook in the Python stack.
        context: Splits its calls; None if it runs stock.
        stack: Leaves the context.
    """

    depth: int
    context: QueuedCalls | None
    stack: ExitStack


class _OpenForwards(threading.local):
    """The forwards that are under way on a thread, outermost first."""

    def __init__(self) -> None:
        self.forwards: list[_OpenForward] = []


class _ForwardEndHook(ModuleHook):
    """A hook after a forward that is called with the forward's output; with None if the forward has failed."""

    def __init__(self, callback: Callable[[Any], None]) -> None:
        super().__init__()
        self._call_with_output = callback

    def __call__(self, module: nn.Module, args: Any = (), *output: Any) -> None:  # noqa: ARG002
        """Take the module's output: torch calls this after each of its forwards."""
        self._call_with_output(output)
