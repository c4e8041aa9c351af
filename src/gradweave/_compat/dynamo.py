"""Private names of Dynamo: being told that something is about to be compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

outside_of_graphs: Callable[[Any], Any] = torch._disable_dynamo  # type: ignore[attr-defined]
"""Decorates a function that Dynamo is to call between two graphs; unlike ``torch.compiler.disable``, it imports Dynamo
only when it is called."""


def between_graphs(function: Any) -> Any:
    """Decorate a function that runs as it is, while what it calls may be compiled; its first call imports Dynamo.

    Dynamo takes up a function again behind each of its graphs, in the middle of a ``with``, and can take one context
    for another there.
    """
    return torch._disable_dynamo(function, recursive=False)  # type: ignore[attr-defined]


def call_before_compiling(callback: Callable[..., None]) -> None:
    """Has a function called whenever Dynamo is about to look at a frame; once, however often this is asked for.

    Dynamo forgets its callbacks when it is reset, so this is to be repeated. Where nothing has imported Dynamo there is
    nothing to be told.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and callback not in dynamo.callback_handler.start_callbacks:
        dynamo.callback_handler.register_start_callback(callback)


def stop_calling_before_compiling(callback: Callable[..., None]) -> None:
    """Undoes :func:`call_before_compiling`, if it was done."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and callback in dynamo.callback_handler.start_callbacks:
        dynamo.callback_handler.remove_start_callback(callback)


def not_compiling() -> AbstractContextManager[None]:
    """Context in which code is not told that it is being compiled: optimizers then compute as in eager steps."""
    return _told_of_none() if torch.compiler._is_compiling_flag else nullcontext()


@contextmanager
def _told_of_none() -> Iterator[None]:
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
