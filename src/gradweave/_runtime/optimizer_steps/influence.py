"""The data flow of an optimizer's step: which parameters' gradients reach which updates."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.functions import DispatchMode, flat_leaves
from gradweave._compat.optimizers import own_step
from gradweave._compat.tensors import memory_of
from gradweave._compat.tracing import schema_of
from gradweave._runtime.optimizer_steps.snapshot import copy_attributes

_LARGEST_TRIED = 16 * 2**20
"""Most bytes of parameters for which a step that cannot run on the meta device is tried in memory."""


def find_influence(optimizer: Optimizer) -> str:
    """Return how a step at full size couples parameters or draws random numbers; empty if it does neither.

    Tiny parameters do not show all of it: some optimizers treat large ones differently. The step runs on the meta
    device; if it reads values there, it runs on real parameters, unless they are too large.
    """
    size = sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])
    try:
        return _influence_on(optimizer, "meta")
    except Exception as error:
        if size > _LARGEST_TRIED:
            return (
                f"asks for values of tensors in its step ({type(error).__name__}), so it cannot be followed without "
                f"memory, and {size / 2**20:.0f} MiB of parameters are too many to try"
            )
    return _influence_on(optimizer, None)


def _influence_on(optimizer: Optimizer, device: str | None) -> str:
    trial = _full_copy(optimizer, device)
    params = [p for group in trial.param_groups for p in group["params"]]
    follower = _Follower()
    for number, p in enumerate(params):
        p.grad = torch.zeros_like(p) if device == "meta" else torch.randn_like(p)
        for tensor in (p.detach(), p.grad, *flat_leaves(trial.state.get(p, {}))):
            if isinstance(tensor, torch.Tensor):
                follower.owners[memory_of(tensor)] = frozenset((number,))
                follower.alive.append(tensor)
    with follower:
        for _ in range(2):  # the first step creates the state
            own_step(trial)(trial)
    if follower.draws:
        return f"draws random numbers ({follower.draws}), and would draw different ones in parts"
    for number, p in enumerate(params):
        for tensor in (p.detach(), *flat_leaves(trial.state.get(p, {}))):
            others = follower.owners[memory_of(tensor)] - {number} if isinstance(tensor, torch.Tensor) else ()
            if others:
                return (
                    f"couples its parameters: the update of one of shape {tuple(p.shape)} depends on one of shape "
                    f"{tuple(params[min(others)].shape)}"
                )
    return ""


def _full_copy(optimizer: Optimizer, device: str | None) -> Optimizer:
    state: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
    replaced: dict[int, Any] = {id(optimizer.state): state}
    for group in optimizer.param_groups:
        for p in group["params"]:
            replaced[id(p)] = nn.Parameter(torch.empty_like(p, device=device) if device else p.detach().clone())
            for key, value in optimizer.state.get(p, {}).items():
                like = isinstance(value, torch.Tensor) and value.shape == p.shape
                state[replaced[id(p)]][key] = (
                    torch.empty_like(value, device=device) if like and device else copy.deepcopy(value)
                )
    trial = copy.deepcopy(optimizer, replaced)
    copy_attributes(optimizer, trial, replaced)
    return trial


class _Follower(DispatchMode):
    """A dispatch mode that records which parameters each piece of memory depends on.

    Attributes:
        owners: Positions of those parameters, by memory.
        alive: All tensors seen so far, kept alive so that no address of a storage is used twice.
        draws: Name of the first operation that drew random numbers; empty if none did.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owners: dict[int, frozenset[int]] = defaultdict(frozenset)
        self.alive: list[torch.Tensor] = []
        self.draws = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not self.draws:
            self.draws = str(func)
        result = func(*args, **kwargs)
        for read, written in _rows(func, args, kwargs, result):
            owners = frozenset().union(*(self.owners[memory_of(tensor)] for tensor in read))
            for tensor in written:
                self.owners[memory_of(tensor)] |= owners
            self.alive += written
        return result


def _rows(func: Any, args: Any, kwargs: Any, result: Any) -> Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield the tensors that an operation reads, with those that it writes.

    Foreach and fused operations couple only the tensors at one position of their lists: one pair for each position.
    """
    name = str(func).removeprefix("aten.")
    inputs = [*args, *kwargs.values()]
    lists = [value for value in inputs if isinstance(value, (list, tuple)) and any(map(torch.is_tensor, value))]
    by_position = name.startswith(("_foreach_", "_fused_")) and lists
    if not by_position:
        read = _tensors((inputs,))
        changed = read if schema_of(func).is_mutable else []
        yield read, [*changed, *_tensors((result,))]
        return
    shared = _tensors(value for value in inputs if torch.is_tensor(value))
    results = [value for value in ([result] if _is_row(result) else result or []) if isinstance(value, (list, tuple))]
    for position in range(max(map(len, lists))):
        read = _tensors(value[position] for value in lists if position < len(value))
        made = _tensors(value[position] for value in results if position < len(value))
        yield [*read, *shared], [*read, *made] if schema_of(func).is_mutable else made


def _is_row(result: Any) -> bool:
    return isinstance(result, (list, tuple)) and all(map(torch.is_tensor, result))


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in flat_leaves(list(values)) if isinstance(leaf, torch.Tensor)]
