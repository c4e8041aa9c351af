"""Modules that pass parameters of their submodules to compiled code, past the parameters' class."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import ExtensionFileLoader
from inspect import getattr_static, unwrap
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from gradweave._runtime.optimizer_steps.code_reach import content_of, is_trusted, nested_code


def weights_handed_out(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module's direct torch submodules that its code names, if it also uses compiled code.

    An example is ``fused_gelu(x, self.linear.bias)`` with a scripted ``fused_gelu``.
    """
    names = _Names(type(module))
    if not names.are_compiled:
        return []
    return [p for part in _named_parts(module, names.used) for p in _named_params(part, names.used)]


def _named_parts(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    for name, child in module.named_children():
        if name in names:
            yield child
            if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                yield from child.children()


def _named_params(part: nn.Module, names: set[str]) -> Iterator[nn.Parameter]:
    if type(part).__module__.startswith("torch.nn"):
        for name, p in part.named_parameters(recurse=False):
            if name in names:
                yield p


class _Names:
    """The names in the code of a class's forward, and of the Python code that it calls.

    Attributes:
        used: The names.
        are_compiled: Whether one of them refers to compiled code that is not torch's.
    """

    def __init__(self, cls: type[nn.Module]) -> None:
        self.used: set[str] = set()
        self.are_compiled = False
        self._cls = cls
        self._seen: set[int] = set()
        self._visit(cls.forward)

    def _visit(self, function: Any) -> None:
        function = unwrap(function)
        if not isinstance(function, FunctionType) or id(function) in self._seen or is_trusted(function.__module__):
            return
        self._seen.add(id(function))
        known = dict(function.__globals__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            known[name] = content_of(cell)
        for code in nested_code(function.__code__):
            self.used.update(code.co_names)
            for name in (*code.co_names, *code.co_freevars):
                self._look_at(known.get(name))
                self._look_at(getattr_static(self._cls, name, None))

    def _look_at(self, value: Any) -> None:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, torch.jit.ScriptFunction):
            self.are_compiled = True
        elif isinstance(value, BuiltinFunctionType):
            self.are_compiled |= not is_trusted(value.__module__)
        elif isinstance(value, ModuleType):
            is_extension = isinstance(getattr(value, "__loader__", None), ExtensionFileLoader)
            self.are_compiled |= is_extension and not is_trusted(value.__name__)
        elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
            self._visit(value.forward)
        else:
            self._visit(value)
