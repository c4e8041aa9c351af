"""``reorder()``: weight gradients out of order, under an unchanged training loop."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from gradweave.compat.distributed import is_distributed_tensor
from gradweave.compat.eager import forward_hooks, is_compiled, is_parametrized
from gradweave.compat.tracing import ConvolutionModule
from gradweave.errors import ArgumentError
from gradweave.fusion.hooks import ModuleHook, stack_depth
from gradweave.schedule.builders import single
from gradweave.schedule.costs import Costs
from gradweave.schedule.planning import plan
from gradweave.split.calls import SplitCalls
from gradweave.split.placement import Planned, Turn, turns_of
from gradweave.split.queue import Place, WeightGradientQueue
from gradweave.split.streams import Beside, InLine

POLICIES = ("side_stream", "joint")


def reorder(
    model: nn.Module,
    policy: str = "side_stream",
    *,
    byte_budget: int | None = None,
    costs: Costs | None = None,
) -> Reordering:
    """Takes the weight gradients of linear and convolution layers out of the chain of backward.

    Gradients are bit for bit the stock ones, and all there when ``backward()`` returns. Where a weight is
    used three times or more in different forwards, or by other operations too, the order of summing up
    may differ.

    Args:
        model: Whose layers; those inside of ``torch.utils.checkpoint`` stay in order.
        policy: ``"side_stream"`` computes them on a second stream, beside the input gradients; on the CPU,
            behind them. ``"joint"`` computes there only those that gain from it, where they gain most.
        byte_budget: Bytes that weight gradients which are not finished may keep alive; beyond it, backward
            waits for the oldest. None for no bound.
        costs: What :func:`~gradweave.profile.measure_costs` says of the model, for ``"joint"``.

    Returns:
        A handle that detaches; also a context manager that does so at its end.
    """
    if policy not in POLICIES:
        raise ArgumentError("policy", policy, f"use one of {', '.join(POLICIES)}")
    if byte_budget is not None and byte_budget < 0:
        raise ArgumentError("byte_budget", byte_budget, "give 0 or more bytes, or None for no bound")
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise ArgumentError("model", f"parameters on {len(devices)} devices", "give a model that is on one device")
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise ArgumentError("model", "DataParallel", "copies weights behind our back; use DistributedDataParallel")
        if is_compiled(module):
            raise ArgumentError(
                "model", "torch.compile", "runs layers where they cannot be split; give the plain model"
            )
    if is_reordered(model):
        raise ArgumentError("model", type(model).__name__, "is reordered already; detach() that first")
    if any(is_distributed_tensor(p) for p in model.parameters()):
        raise ArgumentError("model", "FSDP", "sharded parameters are not supported; give an unsharded model")
    if (costs is None) == (policy == "joint"):
        raise ArgumentError("costs", costs, 'give those of measure_costs() with policy="joint", and only there')
    device = devices.pop()
    place: Place = Beside(device) if device.type == "cuda" else InLine()
    if costs is not None:
        place = Planned(place, _turns(model, costs, policy))
    return Reordering(model, place, byte_budget)


def _turns(model: nn.Module, costs: Costs, policy: str) -> tuple[Turn, ...]:
    """What a policy of the scheduler makes of a model's measured costs; bytes are bounded by the queue."""
    number_of = {name or type(model).__name__: number for number, (name, _) in enumerate(_layers(model))}
    layer_of = {index: number_of[layer.name] for index, layer in enumerate(costs.layers) if layer.name in number_of}
    if not layer_of:
        raise ArgumentError("costs", costs.name, "has no layer of this model; measure the model that is reordered")
    return turns_of(plan(single(costs), policy=policy), layer_of)


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers whose gradients are to come last, in the order of the model."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, ConvolutionModule))]


def is_reordered(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is reordered."""
    hooks = (hook for module in model.modules() for hook in forward_hooks(module))
    return any(isinstance(hook, _Enter) and hook.attached for hook in hooks)


class Reordering:
    """What :func:`reorder` returns: a hold on the attachment."""

    def __init__(self, model: nn.Module, place: Place, byte_budget: int | None) -> None:
        self._queue = WeightGradientQueue(place, byte_budget)
        self._model = model
        self._own = _Own()
        self._open: WeakSet[SplitCalls] = WeakSet()
        self._detached = False
        self._before = model.register_forward_pre_hook(_Enter(self._enter), prepend=True)
        self._behind = model.register_forward_hook(_Enter(self._leave), always_call=True)

    def __enter__(self) -> Reordering:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    @property
    def most_bytes_held(self) -> int:
        """The most bytes that unfinished weight gradients have kept alive at once."""
        return self._queue.most_held

    def detach(self) -> None:
        """Lets go: what the model runs from now on is stock."""
        self._detached = True
        self._before.remove()
        for calls in self._open:
            calls.closed = True
        if not self._open:
            self._behind.remove()

    def _enter(self, *_: Any) -> None:
        depth = stack_depth()
        while self._own.forwards and self._own.forwards[-1][0] >= depth:
            self._close()
        calls = SplitCalls(self._queue, self._weights())
        stack = ExitStack()
        stack.enter_context(calls)
        self._open.add(calls)
        self._own.forwards.append((depth, calls, stack))

    def _leave(self, *_: Any) -> None:
        if self._own.forwards:
            self._close()
        if self._detached and not self._open:
            self._behind.remove()

    def _close(self) -> None:
        _, calls, stack = self._own.forwards.pop()
        calls.closed = True
        self._open.discard(calls)
        stack.close()

    def _weights(self) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        """Those that can be read without computing them, by number; others have their gradients in stock order."""
        weights: dict[int, Any] = {}
        for number, (_, layer) in enumerate(_layers(self._model)):
            if is_parametrized(layer) or not _is_plain(layer.weight):
                continue
            if layer.bias is None or _is_plain(layer.bias):
                weights[number] = layer.weight, layer.bias
        return weights


def _is_plain(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and not nn.parameter.is_lazy(weight)


class _Own(threading.local):
    """The forwards that a thread is in: how deep in the stack, and their contexts.

    One that was left by an interrupt, which no hook hears of, is found by its depth at the next.
    """

    def __init__(self) -> None:
        self.forwards: list[tuple[int, SplitCalls, ExitStack]] = []


class _Enter(ModuleHook):
    """A hook by which the next reorder() finds this one; a copy of the model does not have it."""

    @property
    def attached(self) -> bool:
        """Whether it does anything."""
        return self._callback is not None
