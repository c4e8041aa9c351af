"""Detection of optimizers that do not treat their parameters independently."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.functions import flat_leaves
from gradweave._compat.optimizers import own_step
from gradweave._compat.tensors import memory_of
from gradweave._runtime.optimizer_steps.code_reach import find_reach, is_torchs
from gradweave._runtime.optimizer_steps.influence import find_influence
from gradweave._runtime.optimizer_steps.partial import PartialStepper
from gradweave._runtime.optimizer_steps.snapshot import (
    copy_attributes,
    instance_data,
    is_data,
    is_immutable,
    own_attributes,
)
from gradweave.errors import UnsupportedError

_SIDE = 2
_SAMPLES_OF_A_KIND = 4
"""Number of a group's parameters of one kind (dimensions, dtype, device) that are tried in place of all of them."""
_STEPS = 3

_GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "random": lambda g: g,
    "large": lambda g: g * 1e12,
    "tiny": lambda g: g * 1e-12,
    "zero": torch.zeros_like,
    "infinite": lambda g: g * torch.inf,
    "not a number": lambda g: g * torch.nan,
    "missing": lambda g: None,  # noqa: ARG005
}
"""Changes of one parameter's gradient in the second step; the other parameters' updates must not depend on it."""


def check_independent(optimizer: Optimizer, *, remedy: str) -> None:
    """Raise UnsupportedError unless stepping an optimizer in parts equals stepping it whole, bit for bit.

    Copies of the optimizer on tiny parameters take a few steps, one whole, one in two parts, also with one gradient
    that is huge, missing or not finite. A norm over several parameters, or a decision that reads all of them, makes the
    two differ. Optimizers that are not torch's own are checked further: for writes to anything but parameters and their
    state, a step that wraps its parent's, opaque attributes, and, at full size on the meta device, gradients that reach
    another parameter's update and random numbers.

    Args:
        optimizer: The optimizer; it is not changed.
        remedy: The remedy in the message.
    """
    try:
        fault = _fault_of(optimizer)
    except Exception as error:
        fault = f"cannot be stepped in parts ({type(error).__name__}: {error})"
    if fault:
        raise UnsupportedError(type(optimizer).__name__, fault, remedy)


def _fault_of(optimizer: Optimizer) -> str:
    """Return why an optimizer cannot be stepped in parts; empty if it can."""
    if is_torchs(optimizer):
        with _side_effects_undone(optimizer):
            return _difference(optimizer, "random")
    fault = _wrapped_step_of_parent(type(optimizer)) or _opaque_attribute(optimizer) or find_reach(optimizer)
    if fault:
        return fault
    with _side_effects_undone(optimizer):
        fault = _writes_elsewhere(optimizer)
    for kind in _GRADIENTS:
        if not fault:
            with _side_effects_undone(optimizer):
                fault = _difference(optimizer, kind)
    if not fault:
        with _side_effects_undone(optimizer):
            fault = find_influence(optimizer)
    return fault


def keeps_gradients(optimizer: Optimizer) -> bool:
    """Return whether a step keeps gradients in the state, where the next ``zero_grad()`` may change them."""
    if is_torchs(optimizer):
        return False
    with _side_effects_undone(optimizer):
        tiny = _tiny_copy(optimizer)
        _set_gradients(tiny, torch.Generator().manual_seed(2))
        gradients = {memory_of(p.grad) for p in _params(tiny) if p.grad is not None}
        own_step(tiny)(tiny)
    leaves = flat_leaves(list(tiny.state.values()))
    return any(isinstance(leaf, torch.Tensor) and memory_of(leaf) in gradients for leaf in leaves)


def _wrapped_step_of_parent(cls: type[Optimizer]) -> str:
    """Return a fault if a class has a step that calls its parent's.

    What it does before and after the call cannot be told apart from the update.
    """
    owners = [owner for owner in cls.__mro__ if "step" in vars(owner) and owner not in (Optimizer, object)]
    for owner in owners[:-1]:
        if "step" in unwrap(vars(owner)["step"]).__code__.co_names:
            return (
                f"has a step() that calls another's: what {owner.__name__}.step() does around the update cannot be "
                "deferred with it (a hook can do that instead: register_step_pre_hook, register_step_post_hook)"
            )
    return ""


def _opaque_attribute(optimizer: Optimizer) -> str:
    """Return a fault if a loop could change an attribute unnoticed between a step and its updates."""
    settings = {f"its attribute {name!r}": value for name, value in own_attributes(optimizer).items()}
    for index, group in enumerate(optimizer.param_groups):
        settings |= {f"param_groups[{index}][{key!r}]": value for key, value in group.items() if key != "params"}
    for place, value in settings.items():
        if not is_data(value) and not is_immutable(value):
            return (
                f"keeps a {type(value).__name__} in {place}, which may change between a step and its deferred updates"
            )
    return ""


def _writes_elsewhere(optimizer: Optimizer) -> str:
    """Return a fault if a step writes anything that is neither a parameter nor in ``state``."""
    tiny = _tiny_copy(optimizer)
    classes = [owner for owner in type(optimizer).__mro__ if not owner.__module__.startswith("torch.")]
    before = _settings(tiny), instance_data(tiny), [_plain_attributes(owner) for owner in classes]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    _set_gradients(tiny, torch.Generator().manual_seed(2))
    gradients = [p.grad for p in _params(tiny)]
    if own_step(tiny)(tiny) is not None:
        return "has a step() that returns something, which it could only know after all updates"
    if any(p.grad is not gradient for p, gradient in zip(_params(tiny), gradients, strict=True)):
        return "assigns .grad in its step, which would show only once the update is done"
    if not torch.equal(torch.get_rng_state(), torch_state) or random.getstate() != python_state:
        return "draws random numbers, and would draw different ones in parts"
    groups, attributes, of_classes = before
    for index, (then, now) in enumerate(zip(groups, _settings(tiny), strict=True)):
        for key in now:
            if key not in then or not _equal(then[key], now[key]):
                return (
                    f"writes param_groups[{index}][{key!r}] in its step, and so couples its parameters: one value for "
                    "several (keep it in state[p])"
                )
    for name, now in instance_data(tiny).items():
        if name not in attributes or not _equal(attributes[name], now):
            return (
                f"writes its attribute {name!r} in its step, and so couples its parameters: one value for several "
                "(keep it in state[p])"
            )
    for owner, then in zip(classes, of_classes, strict=True):
        for name, now in _plain_attributes(owner).items():
            if name not in then or not _equal(then[name], now):
                return f"writes the class attribute {owner.__name__}.{name} in its step, and so couples its parameters"
    return ""


def _difference(optimizer: Optimizer, kind: str) -> str:
    """Return a fault if a copy stepped whole and one stepped in two parts differ, with one gradient of a kind."""
    whole, in_parts = _tiny_copy(optimizer), _tiny_copy(optimizer)
    generator = torch.Generator().manual_seed(0)
    for number in range(_STEPS):
        _set_gradients(whole, generator)
        if number == 1 and (params := _params(whole)):
            changed = _GRADIENTS[kind](params[0].grad)  # type: ignore[arg-type]
            params[0].grad = changed
        for one, other in zip(_params(whole), _params(in_parts), strict=True):
            other.grad = None if one.grad is None else one.grad.clone()
        own_step(whole)(whole)
        for part in range(2):
            PartialStepper(in_parts).step(_subset(in_parts, part, 2))
        PartialStepper(in_parts).step_nothing()
    if _same(whole, in_parts):
        return ""
    seen = "" if kind == "random" else f", as a gradient that is {kind} shows"
    return (
        "couples its parameters (a norm over several, or one step count for several"
        f"{seen}): updating them at different times would change the result"
    )


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _set_gradients(optimizer: Optimizer, generator: torch.Generator) -> None:
    for p in _params(optimizer):
        p.grad = torch.randn(p.shape, generator=generator).to(p)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _plain_attributes(cls: type) -> dict[str, Any]:
    """Return copies of the data among a class's own attributes."""
    return {
        name: copy.deepcopy(value)
        for name, value in vars(cls).items()
        if isinstance(value, (bool, int, float, complex, str, list, dict, set, torch.Tensor))
        and not name.startswith("__")
    }


@contextmanager
def _side_effects_undone(optimizer: Optimizer) -> Iterator[None]:
    """Restore random number generators and class attributes, which a trial step may change, at its end."""
    classes = [owner for owner in type(optimizer).__mro__ if not owner.__module__.startswith("torch.")]
    before = [(owner, _plain_attributes(owner)) for owner in classes if owner is not object]
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        for owner, attributes in before:
            for name, now in _plain_attributes(owner).items():
                if name not in attributes:
                    delattr(owner, name)
                elif not _equal(attributes[name], now):
                    setattr(owner, name, attributes[name])


def _subset(optimizer: Optimizer, part: int, parts: int) -> dict[int, list[nn.Parameter]]:
    """Return every ``parts``-th parameter of each group, from ``part`` on."""
    chosen = {index: group["params"][part::parts] for index, group in enumerate(optimizer.param_groups)}
    return {index: params for index, params in chosen.items() if params}


def _tiny_copy(optimizer: Optimizer) -> Optimizer:
    """Return a copy of an optimizer with parameters of the same kinds, but at most two elements a side.

    Of a group's many parameters of one kind, it has a few.
    """
    generator = torch.Generator().manual_seed(1)
    state: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
    replaced: dict[int, Any] = {id(optimizer.state): state}
    sampled: set[int] = set()
    corners: dict[int, Any] = {}
    for group in optimizer.param_groups:
        of_kind: dict[Any, int] = defaultdict(int)
        for p in group["params"]:
            kind = (p.dim(), p.dtype, p.device, p.numel() == 0)
            of_kind[kind] += 1
            if of_kind[kind] > _SAMPLES_OF_A_KIND:
                replaced[id(p)] = _NOT_SAMPLED
                continue
            tiny = torch.randn([min(_SIDE, side) for side in p.shape], generator=generator)
            replaced[id(p)] = nn.Parameter(tiny.to(device=p.device, dtype=p.dtype))
            sampled.add(id(replaced[id(p)]))
            if optimizer.state.get(p):
                state[replaced[id(p)]] = {key: _corner(value, corners) for key, value in optimizer.state[p].items()}
    tiny_optimizer = copy.deepcopy(optimizer, replaced)
    for group in tiny_optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in sampled]
    copy_attributes(optimizer, tiny_optimizer, replaced)
    return tiny_optimizer


_NOT_SAMPLED = object()
"""The place holder in a copy for a parameter that is not sampled."""


def _corner(value: Any, corners: dict[int, Any]) -> Any:
    """Return the first elements of a tensor in each dimension, or a copy of anything else; ``corners`` is the memo."""
    if isinstance(value, torch.Tensor):
        if id(value) not in corners:
            corners[id(value)] = value[tuple(slice(_SIDE) for _ in value.shape)].clone()
        return corners[id(value)]
    return copy.deepcopy(value, corners)


def _same(one: Optimizer, other: Optimizer) -> bool:
    for p, q in zip(_params(one), _params(other), strict=True):
        if not _equal(p.detach(), q.detach()):
            return False
        mine, theirs = one.state.get(p, {}), other.state.get(q, {})
        if mine.keys() != theirs.keys() or not all(_equal(value, theirs[key]) for key, value in mine.items()):
            return False
    return True


def _equal(one: Any, other: Any) -> bool:
    """Return whether two settings are equal; NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same_kind = one.shape == other.shape and one.dtype == other.dtype
        return same_kind and bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, float) and one != one:
        return bool(other != other)
    return bool(one == other)
