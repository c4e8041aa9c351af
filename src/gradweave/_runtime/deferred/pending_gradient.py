"""Gradients that are still being averaged, or that a pending update is still to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradweave._compat.functions import no_torch_function
from gradweave._runtime.deferred.arguments import METADATA, of_type
from gradweave.errors import GradweaveError

_RESOLVE = "_gradweave_resolve"


class PendingGradient(torch.Tensor):
    """A gradient that is resolved before it is used.

    :func:`make_gradient_pending` gives a gradient this class, and :func:`make_gradient_plain` takes it away. The class
    of the object is swapped, instead of the object in ``.grad``, so that other references to the gradient stay valid.

    Only functions that are called from Python consult ``__torch_function__``. Autograd, which adds to ``.grad`` in C++,
    does not: the owner of the gradient has to resolve it before a backward adds to it.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with no_torch_function():
                return func(*args, **kwargs)
        for gradient in of_type((args, kwargs), PendingGradient):
            _resolve(gradient)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _resolve(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _resolve(self)
        return self.__reduce_ex__(protocol)


def make_gradient_pending(gradient: torch.Tensor, resolve: Callable[[], None]) -> None:
    """Turn a plain gradient into a pending one.

    Args:
        gradient: The gradient, of class ``torch.Tensor``.
        resolve: Called before the gradient is used; must call :func:`make_gradient_plain`.
    """
    gradient.__dict__[_RESOLVE] = resolve
    gradient.__class__ = PendingGradient


def make_gradient_plain(gradient: torch.Tensor) -> None:
    """Turn a pending gradient into a plain one again; leave a plain one as it is."""
    if type(gradient) is PendingGradient:
        gradient.__class__ = torch.Tensor  # type: ignore[assignment]
        # torch pickles and copies a tensor that has instance attributes in another way than one without.
        gradient.__dict__.pop(_RESOLVE, None)


def _resolve(gradient: torch.Tensor) -> None:
    resolve: Callable[[], None] | None = gradient.__dict__.get(_RESOLVE)
    if resolve is None:  # another thread has made it plain since its class was read
        return
    resolve()
    if type(gradient) is PendingGradient:
        raise GradweaveError("a gradient is used whose update was given up: its value is not valid; run a new backward")
