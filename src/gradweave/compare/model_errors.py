"""Errors in a user's own model, data or loss, reported as one line about that model instead of a traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import gradweave
from gradweave.errors import ArgumentError, GradweaveError

_LONGEST = 300
"""Characters of a message that are kept; torch's longest ones are pages."""
_NOT_THE_USERS = (Path(gradweave.__file__).parent, Path(torch.__file__).parent)


@contextmanager
def errors_of_model(name: str, what_failed: str, argument: str = "model") -> Iterator[None]:
    """Turn any error but gradweave's own and lack of memory into an ArgumentError about the model called ``name``.

    Args:
        name: Name of the model.
        what_failed: Beginning of the message, such as "fails in a training step".
        argument: The argument that named the model, as its user wrote it.
    """
    try:
        yield
    except (GradweaveError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        # SystemExit is caught on purpose: a script that is imported as a model may end the process.
        if is_out_of_memory(error):
            raise
        raise ArgumentError(argument, name, f"{what_failed}: {one_line(error)}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is lack of memory: a GPU has an error class for it, a CPU only a message."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def one_line(error: BaseException) -> str:
    """Return an error as a line: its type, its message, and its place in the user's code."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}){_place(error)}"
    message = " ".join(str(error).split())
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]} ..."
    return f"{type(error).__name__}{': ' if message else ''}{message}{_place(error)}"


def _place(error: BaseException) -> str:
    """Return the innermost line of a file that belongs neither to torch, to gradweave nor to a library."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_users = path.is_file() and not any(path.is_relative_to(home) for home in _NOT_THE_USERS)
        if is_users and "importlib" not in path.parts and "site-packages" not in path.parts:
            return f" ({path.name}, line {frame.lineno})"
    return ""
