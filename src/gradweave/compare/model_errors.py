"""What goes wrong in a user's own model, data or loss, said as an error of that model: one line, not a traceback."""

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
    """Context in which any error but ours, and lack of memory, is one of the model called ``name``.

    Args:
        name: What the model is called.
        what_failed: Begins the message, as in "fails in a training step".
        argument: That gave the name, if it was not the model's own.
    """
    try:
        yield
    except (GradweaveError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise ArgumentError(argument, name, f"{what_failed}: {described(error)}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """A GPU has an error of its own for it; a CPU has a message."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def described(error: BaseException) -> str:
    """An error in a line: its type, its message, and where in the user's code it came from."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}){_place(error)}"
    message = " ".join(str(error).split())
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]} ..."
    return f"{type(error).__name__}{': ' if message else ''}{message}{_place(error)}"


def _place(error: BaseException) -> str:
    """The innermost line of a file that is neither torch's, ours nor Python's own."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_users = path.is_file() and not any(path.is_relative_to(home) for home in _NOT_THE_USERS)
        if is_users and "importlib" not in path.parts and "site-packages" not in path.parts:
            return f" ({path.name}, line {frame.lineno})"
    return ""
