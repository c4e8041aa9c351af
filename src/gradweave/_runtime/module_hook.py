"""Hooks on modules that are not copied or saved with the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gradweave._compat.functions import asked_by_script
from gradweave.errors import GradweaveError


class ModuleHook:
    """A forward pre-hook of a module that does nothing in copies of the module.

    ``copy.deepcopy`` and pickle take a module's hooks along. There this one becomes a hook without a callback, so that
    the copy is a stock model and does not refer to the attachment.

    Args:
        callback: Called with the module, the forward's arguments and, if the hook is registered so, its keywords.
    """

    def __init__(self, callback: Callable[..., None] | None = None) -> None:
        self._callback = callback

    def __call__(self, module: nn.Module, args: Any = (), *keywords: Any) -> None:
        """Call the callback, before the module's forward."""
        if self._callback is not None:
            self._callback(module, args, *keywords)

    @property
    def __name__(self) -> str:
        """Name of the class, unless ``torch.jit.script`` asks: it compiles a module's hooks by their names."""
        if asked_by_script():
            raise GradweaveError(
                "torch.jit.script() of a model that is fused or reordered, or of its copy: gradweave's hooks cannot "
                "be scripted; detach() first, or script a new model that has loaded this one's state dict"
            )
        return type(self).__qualname__

    def __deepcopy__(self, _: Any) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> Any:
        return ModuleHook, ()
