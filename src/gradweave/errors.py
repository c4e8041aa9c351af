"""Every error gradweave raises on purpose, under one base class.

A message names the argument, the value it had, and what to do instead.
"""

from __future__ import annotations


class GradweaveError(Exception):
    """Base class: ``except GradweaveError`` catches whatever gradweave refuses."""


class ArgumentError(GradweaveError, ValueError):
    """An argument has a value that cannot be used.

    Args:
        argument: Name of the argument, as its user wrote it.
        value: The offending value.
        remedy: What would be accepted instead.
    """

    def __init__(self, argument: str, value: object, remedy: str) -> None:
        self.argument = argument
        self.value = value
        self.remedy = remedy
        super().__init__(argument, value, remedy)

    def __str__(self) -> str:
        return f"{self.argument}={self.value!r}: {self.remedy}"


class ScheduleError(GradweaveError):
    """A schedule cannot be carried out; the message names the tasks involved."""
