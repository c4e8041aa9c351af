"""Those that read weights or gradients without asking Python: for them nothing may be pending."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gradweave.compat.eager import is_compiled, is_compiled_outside, storage_users

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


class Ownership:
    """Tells whether nothing but a parameter refers to its memory."""

    def __init__(self) -> None:
        self._not_shared: dict[int, int] = {}

    def forget(self) -> None:
        """Looks at all parameters again."""
        self._not_shared = {}

    def is_sole(self, p: nn.Parameter) -> bool:
        """Whether no other tensor, and no other process, can see what is written to a parameter."""
        if storage_users(p) > 1:
            return False
        address = p.data_ptr()
        if self._not_shared.get(id(p)) != address:  # to ask torch takes ten times as long
            if p.device.type == "cpu" and p.is_shared():
                return False
            self._not_shared[id(p)] = address
        return True
