"""Every error that gradweave raises on purpose, under one base class.

A message has three parts: the subject, the reason, and the remedy.
"""

from __future__ import annotations


class GradweaveError(Exception):
    """Base class: ``except GradweaveError`` catches everything that gradweave refuses."""


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


class UnsupportedError(GradweaveError, ValueError):
    """A model, an optimizer or a loop has a property that cannot be supported.

    Args:
        subject: What has the property, as its user would call it: ``"FSDP"``, ``"weights of Embedding"``.
        reason: Why it cannot be supported.
        remedy: What to do instead; empty if nothing helps.
    """

    def __init__(self, subject: str, reason: str, remedy: str = "") -> None:
        self.subject = subject
        self.reason = reason
        self.remedy = remedy
        super().__init__(subject, reason, remedy)

    def __str__(self) -> str:
        return f"{self.subject}: {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


class ScheduleError(GradweaveError):
    """A schedule cannot be carried out; the message names the tasks involved."""


class LostPeerError(GradweaveError):
    """Ranks can no longer train together: some are lost, or have stopped, or sent numbers that are not finite.

    Args:
        message: What happened, and what to do.
        ranks: Global ranks of those that are lost, as far as they are known.
        step: The training step at which it was noticed, where steps are counted.
        checkpoint: The file that this rank left behind; None if there is none.
    """

    def __init__(
        self, message: str, *, ranks: tuple[int, ...] = (), step: int | None = None, checkpoint: str | None = None
    ) -> None:
        self.ranks = ranks
        self.step = step
        self.checkpoint = checkpoint
        super().__init__(message)
