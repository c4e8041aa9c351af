"""Reasons why a training step is not one graph."""

from __future__ import annotations

from gradweave.errors import GradweaveError


class RefusedError(GradweaveError):
    """A step that cannot be taken in any form, or not as it was asked for; it has changed nothing."""


class NotOneGraphError(GradweaveError):
    """A step that cannot be one graph; it is taken eagerly."""


class PartialGradientsError(RefusedError):
    """A step whose gradients are not those of its messages: others may have one that it lacks, or the reverse."""


class HookError(NotOneGraphError):
    """A step that cannot be one graph while a parameter has a hook; looking for hooks again costs nothing."""


class NoStateError(NotOneGraphError):
    """A step whose optimizer must first take an eager step, which creates its state."""
