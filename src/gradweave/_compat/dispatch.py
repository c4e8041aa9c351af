"""Seeing every operation that torch carries out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class EveryCall(TorchDispatchMode):
    """Context in which every operation is told of before it runs, with its arguments."""

    def __init__(self, tell: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """As torch calls it."""
        self._tell(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class EveryResult(TorchDispatchMode):
    """Context in which every operation is told of behind its run, with its arguments and its result.

    Also those of backward, whichever thread runs it.
    """

    def __init__(self, tell: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """As torch calls it."""
        result = func(*args, **(kwargs or {}))
        self._tell(func, args, kwargs or {}, result)
        return result
