"""What users give as an optimizer: one of torch's, or what a framework has wrapped around it."""

from __future__ import annotations

from typing import TypeVar

from torch.optim import Optimizer

T = TypeVar("T")

_FRAMEWORKS = frozenset({"accelerate", "lightning", "pytorch_lightning", "lightning_fabric"})
"""Those whose wrappers hold the optimizer in their attribute ``optimizer`` and leave its update as it is."""


def without_wrapper(optimizer: T) -> T | Optimizer:
    """Return the optimizer inside of what Accelerate or Lightning hands out; anything else as it is.

    Only wrappers that are known to add nothing to the update are opened: one like Lookahead has an attribute
    ``optimizer`` too, and an update of its own.
    """
    inner: T | Optimizer = optimizer
    while any(base.__module__.partition(".")[0] in _FRAMEWORKS for base in type(inner).__mro__):
        held = getattr(inner, "optimizer", None)
        if not isinstance(held, Optimizer) or held is inner:
            break
        inner = held
    return inner
