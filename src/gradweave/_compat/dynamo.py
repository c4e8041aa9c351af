"""Private names of Dynamo: what it must not trace, and a call before it compiles."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from gradweave._compat.functions import flat_leaves

outside_of_graphs: Callable[[Any], Any] = torch._disable_dynamo  # type: ignore[attr-defined]
"""Decorate a function that Dynamo calls between two graphs; unlike ``torch.compiler.disable``, importing nothing before
the first call."""


def between_graphs(function: Any) -> Any:
    """Decorate a function that runs as it is, while what it calls may be compiled; its first call imports Dynamo.

    Dynamo resumes a function after each of its graphs, in the middle of a ``with``, and can take one context for
    another there.
    """
    return torch._disable_dynamo(function, recursive=False)  # type: ignore[attr-defined]


def call_before_compiling(callback: Callable[..., None]) -> None:
    """Have a function called whenever Dynamo is about to look at a frame; once, even if this is repeated.

    It must be repeated, since Dynamo forgets its callbacks when it is reset. As long as nothing has imported Dynamo,
    there is nothing to register with.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and callback not in dynamo.callback_handler.start_callbacks:
        dynamo.callback_handler.register_start_callback(callback)


def stop_calling_before_compiling(callback: Callable[..., None]) -> None:
    """Undo :func:`call_before_compiling`, if it was called."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and callback in dynamo.callback_handler.start_callbacks:
        dynamo.callback_handler.remove_start_callback(callback)


def not_compiling() -> AbstractContextManager[None]:
    """Return a context in which code does not see that it is compiled: optimizers then compute as in eager steps."""
    return _without_compiling_flag() if torch.compiler._is_compiling_flag else nullcontext()


@contextmanager
def _without_compiling_flag() -> Iterator[None]:
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


_SIZE_MARKS = ("_dynamo_", "_has_dynamo_", "_specialize_on")
"""Beginnings of the attributes by which a tensor is marked."""


@contextmanager
def sizes_unmarked(values: Any) -> Iterator[None]:
    """Return a context in which Dynamo takes the sizes of all tensors as fixed, as ``dynamic=False`` promises.

    It does not for tensors that are marked, by the user or by what torch compiled for many shapes and was given them.
    """
    found = [
        (x, name, vars(x)[name])
        for x in flat_leaves(values)
        if isinstance(x, torch.Tensor)
        for name in vars(x)
        if name.startswith(_SIZE_MARKS)
    ]
    for x, name, _ in found:
        delattr(x, name)
    try:
        yield
    finally:
        for x, name, value in found:
            setattr(x, name, value)


class _FailingMetrics(logging.Filter):
    """Leaves out a message of torch 2.11's: it sorts settings to log them, and functions have no order."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Unexpected exception logging" not in record.getMessage()


@contextmanager
def without_failing_metrics() -> Iterator[None]:
    """Return a context in which torch 2.11 does not tell, at each compilation, that it cannot log its settings."""
    log, quiet = logging.getLogger("torch._dynamo.metrics_context"), _FailingMetrics()
    log.addFilter(quiet)
    try:
        yield
    finally:
        log.removeFilter(quiet)
