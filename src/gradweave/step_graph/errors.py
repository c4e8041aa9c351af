"""Reasons why a training step is not one graph."""

from __future__ import annotations

from gradweave.errors import GradweaveError


class RefusedError(GradweaveError):
    """A step that cannot be taken in any form, or not as it was asked for; it has changed nothing."""


class NotOneGraphError(GradweaveError):
    """A step that cannot be one graph; it is taken eagerly."""


class PartialGradientsError(RefusedError):
    """A step in which parameters get no gradient on this rank that others may send one for: it must ask them."""


class UnplannedGradientsError(RefusedError):
    """A step in which parameters get a gradient that are in no message to other ranks.

    Args:
        numbers: Of the trainable parameters.
    """

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers
        super().__init__(numbers)


class HookError(NotOneGraphError):
    """A step that cannot be one graph while a parameter has a hook; looking for hooks again costs nothing."""


class NoStateError(NotOneGraphError):
    """A step whose optimizer must first take an eager step, which creates its state."""
