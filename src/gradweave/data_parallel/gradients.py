"""Gradients that are still on their way: whoever looks at one sees the average over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradweave.compat.eager import no_torch_function
from gradweave.errors import GradweaveError
from gradweave.fusion.pending import METADATA


def pending_class(find_wait: Callable[[], Callable[[], None] | None]) -> type[torch.Tensor]:
    """A class that gradients take on while they are averaged, or while an update with them is still to come.

    Any torch function given such a gradient waits first, which must give it back its own class.

    Args:
        find_wait: Gives what waits; None once there is nothing to wait for.
    """

    def wait() -> None:
        found = find_wait()
        if found is not None:
            found()

    class PendingGradient(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func in METADATA:
                with no_torch_function():
                    return func(*args, **kwargs)
            for gradient in _pending((args, kwargs)):
                gradient._wait()
                if is_pending(gradient):
                    raise GradweaveError("a gradient was kept that was never averaged: its update was given up")
            return func(*args, **kwargs)

        _wait = staticmethod(wait)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            wait()
            return self.__deepcopy__(memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            wait()
            return self.__reduce_ex__(protocol)

    return PendingGradient


def is_pending(value: Any) -> bool:
    """Whether a gradient is still on its way."""
    return type(value).__name__ == "PendingGradient" and hasattr(type(value), "_wait")


def _pending(value: Any) -> Iterator[Any]:
    """The pending gradients among nested arguments."""
    if is_pending(value):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _pending(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _pending(item)
