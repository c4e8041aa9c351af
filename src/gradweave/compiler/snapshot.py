"""Snapshots of values of any kind, which tell later whether a value has changed, also in place."""

from __future__ import annotations

import dis
import logging
import random
import sys
from collections.abc import Callable
from enum import Enum
from functools import cache
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_PLAIN = (int, str, bytes, bool, complex, type(None), type, range, Enum, torch.dtype, torch.device, torch.Size)
_BY_IDENTITY = (logging.Logger, ModuleType, torch.Generator)
_HOLDERS = (torch.Tensor, nn.Module, Optimizer)
MOST_PARTS = 10_000
"""Parts of one value; comparing more in every step takes too long."""


class IncomparableError(Exception):
    """A value holds tensors, which a graph would take for constants, or too many parts."""


def snapshot(value: Any, known: dict[int, Any] | None = None, generators: list[Any] | None = None) -> Any:
    """Return an object that equals a later snapshot of the same value if no part of it has changed.

    Objects are compared by their attributes, or by what pickle would save of them; those without either by identity,
    and so are gradweave's own.

    Args:
        value: Of any kind.
        known: Objects by their id whose parts are left out, and what represents them.
        generators: Is extended by the generators of random numbers that the value holds.

    Raises:
        IncomparableError: If it holds a tensor, a module or an optimizer, or is too large.
    """
    kept: list[Any] = []
    result = _snapshot(value, {} if known is None else dict(known), kept)
    if generators is not None:
        generators += [inner for inner in kept if is_generator(inner)]
    return result


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator of random numbers, of Python's or of NumPy's."""
    return isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random")


def _snapshot(value: Any, seen: dict[int, Any], kept: list[Any]) -> Any:
    kind = type(value)
    if kind is float:
        return value if value == value else "not a number"  # nan differs from itself
    if isinstance(value, _PLAIN):
        return kind, value
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, _HOLDERS):
        raise IncomparableError(f"it holds a {kind.__name__}")
    if len(seen) >= MOST_PARTS:
        raise IncomparableError("it has too many parts to be compared in every step")
    seen[id(value)] = ("seen", len(seen))
    kept.append(value)  # while it lives, no other object gets its id

    def part(inner: Any) -> Any:
        return _snapshot(inner, seen, kept)

    if kind in (list, tuple):
        return kind, *map(part, value)
    if kind is dict:
        return kind, *((part(key), part(inner)) for key, inner in value.items())
    if kind in (set, frozenset):
        return kind, frozenset(map(part, value))
    if isinstance(value, _BY_IDENTITY) or kind.__module__.partition(".")[0] == "gradweave":
        return _Identity(value)
    if isinstance(value, FunctionType):
        return _of_function(value, part)
    if isinstance(value, MethodType):
        return part(value.__func__), part(value.__self__)
    if isinstance(value, BuiltinFunctionType):
        return value.__name__, part(value.__self__)
    if isinstance(value, random.Random):
        return kind, value.getstate()
    return _of_object(value, part)


def _of_function(function: FunctionType, part: Callable[[Any], Any]) -> Any:
    if (function.__module__ or "").partition(".")[0] == "torch":
        return _Identity(function)
    cells = [part(cell.cell_contents) for cell in function.__closure__ or () if _is_filled(cell)]
    names = [name for name in globals_read_by(function.__code__) if name in function.__globals__]
    reads = [part(function.__globals__[name]) for name in names]
    return _Identity(function.__code__), *cells, part(function.__defaults__), *reads


def _of_object(value: Any, part: Callable[[Any], Any]) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject:
        return type(value), str(value.dtype), value.shape, value.tobytes()
    attributes = getattr(value, "__dict__", None)
    if attributes and getattr(type(value), "__reduce_ex__", None) is object.__reduce_ex__:
        return type(value), part(dict(attributes))
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # any: this runs code of the value's class
        return _Identity(value), part(dict(attributes or {}))
    if isinstance(reduced, str):
        return _Identity(value)
    arguments, state, *items = (*reduced[1:], None)[: max(2, len(reduced) - 1)]
    return type(value), part(arguments), part(state), part([list(inner) for inner in items if inner is not None])


@cache
def globals_read_by(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals that a function's code reads, and that of functions inside of it."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (globals_read_by(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return tuple(sorted(own.union(*inner)))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


class _Identity:
    """A reference that equals only another one to the same object, which it keeps alive."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)
