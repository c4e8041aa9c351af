"""Gradients that are still being computed when backward returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from gradweave._compat.functions import map_nested, no_torch_function
from gradweave._compat.tensors import metadata_guard
from gradweave._runtime.deferred.arguments import METADATA


class Source(Protocol):
    """The computation of a late gradient."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Stream of the computation, if it runs beside the backward."""

    def settle(self) -> torch.Tensor:
        """Return the gradient, for use on the current stream and on that of the backward."""

    def ready(self) -> torch.Tensor:
        """Return the gradient, for use on the current stream only; a call of :meth:`done` must follow."""

    def done(self, after: torch.cuda.Event | None = None) -> None:
        """Let the stream of the backward wait for the end of the uses after :meth:`ready`, if an event marks it."""


class LateGradient(torch.Tensor):
    """A stand-in without data for a gradient in ``.grad``, whose use finishes the computation first.

    Operations are forwarded to the real gradient: those from Python by ``__torch_function__``, those from C++, such as
    autograd's accumulation, by ``__torch_dispatch__``. A deferred update calls the source itself, when it needs the
    gradient.
    """

    source: Source

    @staticmethod
    def __new__(cls, like: torch.Tensor, source: Source) -> LateGradient:
        """Return a stand-in of the shape, strides, type and device of ``like``."""
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
        # AccumulateGrad stores a detached alias of the gradient in .grad, which must not finish the computation.
        if func is torch.ops.aten.detach.default:
            return LateGradient(args[0], args[0].source)
        args, kwargs = map_nested(settled, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def settled(value: Any) -> Any:
    """Return the real gradient for a late one, and anything else as it is."""
    return value.source.settle() if type(value) is LateGradient else value


def settle_gradients(params: Iterable[nn.Parameter]) -> None:
    """Replace late gradients in ``.grad`` by the real ones."""
    for p in params:
        if type(p.grad) is LateGradient:
            p.grad = settled(p.grad)
