"""Why a step is not one graph: what is refused, and what is taken eagerly instead."""

from __future__ import annotations

from gradweave.errors import GradweaveError


class RefusedError(GradweaveError):
    """A step that cannot be taken in any form, or not as it was asked for: it is raised, and nothing has changed."""


class NotOneGraphError(GradweaveError):
    """A step that cannot be one graph: it is taken eagerly."""


class HookError(NotOneGraphError):
    """The same for as long as a hook is there, which is noticed at no cost."""


class NoStateError(NotOneGraphError):
    """The optimizer must take a stock step first, which creates its state."""
