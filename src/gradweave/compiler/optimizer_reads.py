"""Values that an optimizer's step may read besides its groups, its state and the gradients.

Attributes, class variables, globals and closures are constants of a traced step. So a snapshot of them is taken when a
step is traced, and compared before each step. The optimizers of torch and of gradweave read nothing of the kind, and
their snapshots are empty.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from gradweave._compat.optimizers import own_step
from gradweave.compiler.snapshot import IncomparableError, globals_read_by, snapshot

_MISSING = "nothing"
"""Stands for a value that is not there."""
_KNOWN = ("torch", "gradweave", "builtins", "abc", "typing")
"""Packages whose code reads nothing of the kind."""
_DATA = (int, float, complex, str, list, tuple, dict, set, frozenset)
_TORCH_ATTRIBUTES = frozenset(
    ("defaults", "state", "param_groups", "step", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured")
)
_TORCH_PREFIXES = ("_optimizer_", "_opt_", "_gradweave_", "_step_count", "_accelerate_")


@dataclass(frozen=True)
class _Access:
    """Access to a value that code reads: in a class, a module's globals, a closure."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]


class OptimizerReads:
    """Snapshot of the values that an optimizer's step may read.

    Args:
        optimizer: The optimizer.

    Attributes:
        incomparable: The reason why a value cannot be compared, so that no graph can be made; None if all can.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._step = own_step(optimizer)
        foreign = [cls for cls in type(optimizer).__mro__ if not _is_known(cls)]
        self._has_foreign_code = bool(foreign)
        self._places: dict[str, _Access] = {}
        for cls in foreign:
            self._places.update(_places_of_class(cls))
        self.incomparable: str | None = None
        self._values = self._snapshots() if self._has_foreign_code else {}

    def unchanged(self) -> bool:
        """Return whether every value is equal to its snapshot."""
        if own_step(self._optimizer) is not self._step:
            return False
        return not self._has_foreign_code or self.changed() is None

    def changed(self) -> str | None:
        """Return the name of a value that differs from its snapshot; None if none does."""
        if not self._has_foreign_code:
            return None
        now = self._snapshots()
        for name in {**self._values, **now}:
            if now.get(name, _MISSING) != self._values.get(name, _MISSING):
                return name
        return None

    def copies(self) -> tuple[dict[str, Any], list[Any]]:
        """Return copies of the values outside of the optimizer that its step could change, for :meth:`restore`."""
        generators: list[Any] = []
        self._snapshots(generators)
        return {name: _copy(place.get()) for name, place in self._places.items()}, list(map(_restoring, generators))

    def restore(self, copied: tuple[dict[str, Any], list[Any]]) -> None:
        """Undo changes to values outside of the optimizer, in place where others may refer to them."""
        copies, generators = copied
        for restore_generator in generators:
            restore_generator()
        before = self._values
        now_there = self._snapshots()
        for name, value in copies.items():
            place = self._places[name]
            now = place.get()
            if now is value or value is _MISSING or now_there[name] == before[name]:
                continue
            if isinstance(now, list):
                now[:] = value
            elif isinstance(now, (dict, set)):
                now.clear()
                now.update(value)
            else:
                place.put(value)

    def _snapshots(self, generators: list[Any] | None = None) -> dict[str, Any]:
        """Return a snapshot of every value by name; extend ``generators`` by the random generators among them."""
        known = {id(self._optimizer): "the optimizer"}
        values: dict[str, Any] = {}
        plain = {key: value for key, value in self._optimizer.defaults.items() if not isinstance(value, torch.Tensor)}
        named = {"defaults": plain}
        named |= {f"attribute {name!r}": value for name, value in own_attributes(self._optimizer).items()}
        for name, value in (*named.items(), *((name, place.get()) for name, place in self._places.items())):
            try:
                values[name] = snapshot(value, known, generators)
            except IncomparableError as error:
                values[name] = str(error)
                self.incomparable = f"it keeps something in its {name}, outside of its state: {error}"
        return values


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that are not torch's."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _TORCH_ATTRIBUTES and not name.startswith(_TORCH_PREFIXES)
    }


def _is_known(part: type | FunctionType | ModuleType) -> bool:
    name = part.__name__ if isinstance(part, ModuleType) else part.__module__ or ""
    return name.partition(".")[0] in _KNOWN


def _restoring(generator: Any) -> Callable[[], Any]:
    """Return a function that resets a generator of random numbers to its current state."""
    if hasattr(generator, "getstate"):
        return partial(generator.setstate, generator.getstate())
    if hasattr(generator, "get_state"):
        return partial(generator.set_state, generator.get_state())
    bits = getattr(generator, "bit_generator", generator)
    return partial(setattr, bits, "state", bits.state) if hasattr(bits, "state") else lambda: None


def _copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # any: copying runs code of the value's class
        return value


def _places_of_class(cls: type) -> Iterator[tuple[str, _Access]]:
    """Yield the data of a class, and what its methods read elsewhere."""
    seen: set[int] = set()
    for name, member in vars(cls).items():
        function = unwrap(getattr(member, "__func__", None) or getattr(member, "fget", None) or member)
        if isinstance(function, FunctionType):
            yield from _places_of_function(function, seen)
        elif not (name.startswith("__") or callable(member) or hasattr(member, "__get__")):
            where = f"class variable {name!r} of {cls.__name__}"
            yield where, _Access(partial(vars(cls).get, name, _MISSING), partial(setattr, cls, name))


def _places_of_function(function: FunctionType, seen: set[int]) -> Iterator[tuple[str, _Access]]:
    """Yield the globals and the closure of a function, and of those that it calls."""
    if id(function.__code__) in seen or _is_known(function):
        return
    seen.add(id(function.__code__))
    for code in _codes(function.__code__):
        for name in globals_read_by(code):
            if name in function.__globals__:
                what = f"global {name!r} of {function.__module__}"
                yield from _places_of_value(what, function.__globals__, name, code, seen)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__" and _contents(cell) is not _MISSING:
            yield from _places_of_cell(f"closure {name!r} of {function.__qualname__}", cell, seen)


def _places_of_value(
    what: str, holder: MutableMapping[str, Any], name: str, code: CodeType, seen: set[int]
) -> Iterator[tuple[str, _Access]]:
    value = unwrap(holder[name]) if callable(holder[name]) else holder[name]
    if isinstance(value, FunctionType):
        yield from _places_of_function(value, seen)
    elif isinstance(value, (ModuleType, type)):
        if isinstance(value, ModuleType) and _is_known(value):
            return
        inside = value.__dict__
        for attribute in set(code.co_names) & inside.keys():
            if isinstance(inside[attribute], _DATA):
                place = _Access(partial(inside.get, attribute, _MISSING), partial(setattr, value, attribute))
                yield f"{what}.{attribute}", place
    elif not callable(value) or hasattr(value, "__dict__"):
        yield what, _Access(partial(holder.get, name, _MISSING), partial(holder.__setitem__, name))


def _places_of_cell(what: str, cell: Any, seen: set[int]) -> Iterator[tuple[str, _Access]]:
    value = _contents(cell)
    if isinstance(value, FunctionType):
        yield from _places_of_function(value, seen)
    elif not isinstance(value, (ModuleType, type)):
        yield what, _Access(partial(_contents, cell), partial(setattr, cell, "cell_contents"))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING
