"""Those that read weights or gradients without asking Python: for them nothing may be pending."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gradweave._compat.eager import is_compiled, is_compiled_outside, is_sole_user

COMPILED = (
    "the model is compiled by now, and a compiled model does not ask for its weights one by one; call torch.compile() "
    "first, and give fuse() what it returns"
)
TRACED = "the model is traced, and what is made of it reads weights without asking"


def why_never(model: nn.Module) -> str:
    """Why no update of a model may ever be pending; empty if they may."""
    for name, module in model.named_modules():
        subject = f"the model's {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{subject} is a ScriptModule, which reads its weights without asking"
        if is_compiled(module) and not is_compiled_outside(module):
            return f"{subject} is compiled in place; torch.compile(model) leaves a place to ask, model.compile() none"
    return ""


def outside_of_compiled(model: nn.Module) -> Iterable[nn.Module]:
    """The modules of a model without those that run inside of a compiled one, whose hooks would be compiled too."""
    yield model
    if not is_compiled(model):
        for child in model.children():
            yield from outside_of_compiled(child)


def weights_looked_at(module: nn.Module) -> list[nn.Parameter]:
    """The weights of whose class one of torch's modules makes its way dependent, such as a fast one in evaluation."""
    if isinstance(module, nn.TransformerEncoder):
        return list(module.layers[0].parameters()) if len(module.layers) else []
    if isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention)):
        return list(module.parameters())
    return []


class Ownership:
    """Tells whether nothing but a parameter, and its optimizer, refers to what an update writes."""

    def __init__(self) -> None:
        self._not_shared: dict[int, int] = {}
        self._references = 0
        stand_in = nn.Parameter(torch.empty(1))
        self._references = self._most_references({stand_in: {"": torch.empty(1)}}, stand_in)

    def forget(self) -> None:
        """Looks at all parameters again."""
        self._not_shared = {}

    def is_sole(self, p: nn.Parameter, state: Mapping[Any, Any]) -> bool:
        """Whether no other tensor, array or process can see what is written to a parameter and its state."""
        if not is_sole_user(p):
            return False
        address = p.data_ptr()
        if self._not_shared.get(id(p)) != address:  # to ask torch takes ten times as long
            if p.device.type == "cpu" and p.is_shared():
                return False
            self._not_shared[id(p)] = address
        return self._most_references(state, p) <= self._references

    def _most_references(self, state: Mapping[Any, Any], p: nn.Parameter) -> int:
        """How many refer to that tensor of a parameter's state, or to the dictionary, to which most do."""
        own = state.get(p)
        if not isinstance(own, dict):
            return 0
        most = sys.getrefcount(own)
        for value in own.values():
            if isinstance(value, torch.Tensor):
                if not is_sole_user(value):
                    return sys.maxsize
                most = max(most, sys.getrefcount(value))
        return most
