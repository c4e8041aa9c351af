"""Lost contact with another rank, told apart from every other error.

torch raises a plain ``RuntimeError`` for most failures of Gloo and of the store, the same type as for a failed kernel,
an exhausted memory or a check in a layer of the user's. Two things together tell: which module made the call that
failed, and the words of the message.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from gradweave.errors import LostPeerError

_MESSENGERS = ("torch.distributed", "gradweave")
"""Packages whose code sends messages: an error of a user's hook has the hook's module innermost in its traceback."""
_OPERATORS = "torch._ops"
"""Whose code calls the operations of a graph: those that send messages, and the user's own."""
_TRANSPORT_WORDS = ("/gloo/", "gloo connect", "nccl")
"""Of the libraries that carry messages, which no other operation speaks of."""
_OTHER_TYPES = (torch.OutOfMemoryError, torch.AcceleratorError, NotImplementedError, RecursionError)
_CONTACT_WORDS = (
    "/gloo/",
    "gloo connect",
    "connection",
    "timed out",
    "timeout",
    "nccl",
    "broken pipe",
    "reset by peer",
)
_DEVICE_WORDS = (
    "cuda error", "cuda failure", "unhandled cuda", "hip error", "hip failure", "unhandled hip", "out of memory",
    "invalid usage",
)  # fmt: skip
"""Of failures on this rank's own device, which NCCL wraps in an error of its own, and which may speak of timeouts
("CUDA error: the launch timed out"). NCCL's "invalid usage" is two ranks on one GPU, or the like."""
_LONGEST_LINE = 300


def is_lost_contact(error: BaseException) -> bool:
    """Return whether messages to another rank failed, and not what a layer, a loss, a hook or the device does."""
    error = root_cause(error)
    if not isinstance(error, RuntimeError) or isinstance(error, _OTHER_TYPES):
        return False
    words = str(error).lower()
    if any(word in words for word in _DEVICE_WORDS):
        return False
    place = _raised_in(error)
    if place == _OPERATORS:
        return any(word in words for word in _TRANSPORT_WORDS)
    if not _is_messenger(place):
        return False
    return isinstance(error, dist.DistError) or any(word in words for word in _CONTACT_WORDS)


@contextmanager
def lost_contact_as(describe: Callable[[str], LostPeerError]) -> Iterator[None]:
    """Return a context for messages that raises lost contact as a :class:`LostPeerError`, and other errors as they are.

    Args:
        describe: Makes the error, from what torch said in a line.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost_contact(error):
            raise
        raise describe(in_a_line(error)) from error


def root_cause(error: BaseException) -> BaseException:
    """Return the error at the end of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def in_a_line(error: BaseException) -> str:
    """Return type and message of an error's root cause as one line of bounded length."""
    error = root_cause(error)
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..."


def _raised_in(error: BaseException) -> str:
    """Return the module whose code raised an error, or made the call into C++ that did."""
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        innermost = frame
    return "" if innermost is None else str(innermost.f_globals.get("__name__", ""))


def _is_messenger(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in _MESSENGERS)
