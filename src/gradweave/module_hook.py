"""Hooks on modules that stay behind when the module is copied or saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradweave.compat.eager import outside_of_graphs


class ModuleHook:
    """A module's forward pre-hook that stays behind when the module is copied or saved.

    Modules take their hooks along; the copy's one does nothing, so that a copy is a stock model.

    Args:
        callback: Called with the module and its arguments; None does nothing.
        when_compiled: Called before that where Dynamo has compiled the module with its hooks; then both run as they
            are, between two graphs. None has the callback compiled along.
    """

    def __init__(
        self,
        callback: Callable[[nn.Module, Any], None] | None = None,
        *,
        when_compiled: Callable[[], None] | None = None,
    ) -> None:
        self._callback = callback
        self._when_compiled = when_compiled

    def __call__(self, module: nn.Module, args: Any = (), *_: Any) -> None:
        """As torch calls it, before the module's forward, with the forward's arguments."""
        if self._callback is None:
            return
        if self._when_compiled is not None and torch.compiler.is_compiling():
            self._between_graphs(module, args)
        else:
            self._callback(module, args)

    @outside_of_graphs
    def _between_graphs(self, module: nn.Module, args: Any) -> None:
        if self._when_compiled is not None:
            self._when_compiled()
        if self._callback is not None:
            self._callback(module, args)

    def __deepcopy__(self, _: Any) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> Any:
        return ModuleHook, ()
