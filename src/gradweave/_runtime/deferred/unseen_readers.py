"""Readers of weights that no Python code notices: what they may read must not be pending."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from gradweave._compat.modules import is_compiled, is_compiled_outside
from gradweave._compat.tensors import is_sole_user

COMPILED = "the model is compiled by now, and reads its weights where no update can come first"
TRACED = "the model is traced, and the traced copy reads weights where no update can come first"


def why_never_pending(model: nn.Module) -> str:
    """Return why no update of a model may ever be pending; empty if updates may be."""
    for name, module in model.named_modules():
        subject = f"the model's {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{subject} is a ScriptModule, which reads its weights where no update can come first"
        if is_compiled(module) and not is_compiled_outside(module):
            return (
                f"{subject} is compiled in place; hooks run outside of torch.compile(model), but not outside of "
                "model.compile()"
            )
    return ""


def modules_outside_compiled(model: nn.Module) -> Iterable[nn.Module]:
    """Yield the modules of a model, except those inside a compiled one, whose hooks would be compiled too."""
    yield model
    if not is_compiled(model):
        for child in model.children():
            yield from modules_outside_compiled(child)


def weights_read_by_class(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights whose class decides how one of torch's modules computes, as on a fast path in evaluation."""
    if isinstance(module, nn.TransformerEncoder):
        return list(module.layers[0].parameters()) if len(module.layers) else []
    if isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention)):
        return list(module.parameters())
    return []


NEVER_LATE = -1
"""Stands for the references to a tensor that is current although an update is pending, such as a step count."""


class Ownership:
    """Finds out whether other objects refer to the memory that an update writes."""

    def __init__(self) -> None:
        self._not_shared: dict[int, int] = {}
        self._references = 0
        stand_in = nn.Parameter(torch.empty(1))
        self._references = self._most_references({stand_in: {"": torch.empty(1)}}, stand_in)

    def forget(self) -> None:
        """Forget what is known of parameters."""
        self._not_shared = {}

    def is_sole(
        self, p: nn.Parameter, state: Mapping[Any, Any], known: Mapping[int, int] = MappingProxyType({})
    ) -> bool:
        """Return whether no other tensor, array or process refers to the memory of a parameter and its state.

        Args:
            p: The parameter.
            state: States by parameter.
            known: Numbers of references to tensors of the state that are the caller's own, by id, or
                :data:`NEVER_LATE`.
        """
        if not is_sole_user(p):
            return False
        address = p.data_ptr()
        if self._not_shared.get(id(p)) != address:  # is_shared() takes ten times as long
            if p.device.type == "cpu" and p.is_shared():
                return False
            self._not_shared[id(p)] = address
        return self._most_references(state, p, known) <= self._references

    def _most_references(
        self, state: Mapping[Any, Any], p: nn.Parameter, known: Mapping[int, int] = MappingProxyType({})
    ) -> int:
        """Return the greatest number of references to a parameter's state or to a tensor in it."""
        own = state.get(p)
        if not isinstance(own, dict):
            return 0
        most = sys.getrefcount(own)
        for value in own.values():
            if isinstance(value, torch.Tensor) and known.get(id(value)) != NEVER_LATE:
                if not is_sole_user(value):
                    return sys.maxsize
                most = max(most, sys.getrefcount(value) - known.get(id(value), 0))
        return most
