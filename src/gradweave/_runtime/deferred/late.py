"""Gradients that are still being computed when backward returns, and how an update waits for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from gradweave._compat.eager import map_nested, metadata_guard, no_torch_function
from gradweave._runtime.deferred.pending import METADATA


class Source(Protocol):
    """Where a late gradient comes from."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where it is computed, if that is beside the backward."""

    def settle(self) -> torch.Tensor:
        """The gradient, for the current stream and the one that backward ran on; nothing is left to do."""

    def ready(self) -> torch.Tensor:
        """The gradient, for the current stream alone; :meth:`done` must follow."""

    def done(self, behind: torch.cuda.Event | None = None) -> None:
        """What came behind :meth:`ready` ends with an event, for the stream that backward ran on to wait for."""


class LateGradient(torch.Tensor):
    """Stands for a gradient in ``.grad``: whoever uses it has it finished first.

    Operations, also from C++, go through to the real gradient. Forward-fusion, which knows when the
    update needs it, asks the source itself.
    """

    source: Source

    @staticmethod
    def __new__(cls, like: torch.Tensor, source: Source) -> LateGradient:
        """One of the shape, strides, type and device of ``like``."""
        with no_torch_function():
            late: LateGradient = metadata_guard(cls, like)
        late.source = source
        return late

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            with no_torch_function():
                return func(*args, **(kwargs or {}))
        args, kwargs = map_nested(settled, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # by which autograd puts it into .grad
            return LateGradient(args[0], args[0].source)
        args, kwargs = map_nested(settled, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def settled(value: Any) -> Any:
    """The real gradient for a late one; anything else as it is."""
    return value.source.settle() if type(value) is LateGradient else value


def settle_gradients(params: Iterable[nn.Parameter]) -> None:
    """Puts real gradients in the place of late ones."""
    for p in params:
        if type(p.grad) is LateGradient:
            p.grad = settled(p.grad)
