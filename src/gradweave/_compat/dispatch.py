"""Modes that see every operation that torch runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class EveryCall(TorchDispatchMode):
    """A context in which a callback gets every operation before it runs, with its arguments."""

    def __init__(self, tell: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, and tell of it."""
        self._tell(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class EveryResult(TorchDispatchMode):
    """A context in which a callback gets every operation after it ran, with its arguments and its result.

    Operations of backward are seen too, on whatever thread it runs.
    """

    def __init__(self, tell: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, and tell of it."""
        result = func(*args, **(kwargs or {}))
        self._tell(func, args, kwargs or {}, result)
        return result
