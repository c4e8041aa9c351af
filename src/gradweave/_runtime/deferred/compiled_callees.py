"""Finding modules whose code hands parameters of modules inside of them to compiled code, which does not ask."""

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
    """The parameters of torch's modules directly inside of one that its code names, if it uses compiled code too.

    Such as ``fused_gelu(x, self.linear.bias)``, where ``fused_gelu`` was scripted.
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
    """The names that a class' forward uses, with all that it calls of its own and of libraries written in Python.

    Attributes:
        used: The names.
        are_compiled: Whether one of them stands for code that is not Python's, nor torch's.
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
