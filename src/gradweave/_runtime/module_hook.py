"""Hooks on modules that stay behind when the module is copied or saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gradweave._compat.eager import asked_by_script
from gradweave.errors import GradweaveError


class ModuleHook:
    """A module's forward pre-hook that stays behind when the module is copied or saved.

    Modules take their hooks along; the copy's one does nothing, so that a copy is a stock model.
    """

    def __init__(self, callback: Callable[..., None] | None = None) -> None:
        self._callback = callback

    def __call__(self, module: nn.Module, args: Any = (), *keywords: Any) -> None:
        """As torch calls it, before the module's forward, with the forward's arguments."""
        if self._callback is not None:
            self._callback(module, args, *keywords)

    @property
    def __name__(self) -> str:
        """As functions have one, by which ``torch.jit.script`` compiles a module's hooks."""
        if asked_by_script():
            raise GradweaveError(
                "torch.jit.script() of a model that is fused or reordered, or of its copy: hooks of gradweave's cannot "
                "be scripted; detach() first, or script a model made anew with this one's state dict"
            )
        return type(self).__qualname__

    def __deepcopy__(self, _: Any) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> Any:
        return ModuleHook, ()
