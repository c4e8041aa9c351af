"""Optimizers inside the wrappers of training frameworks."""

from __future__ import annotations

from typing import TypeVar

from torch.optim import Optimizer

T = TypeVar("T")

_FRAMEWORKS = frozenset({"accelerate", "lightning", "pytorch_lightning", "lightning_fabric"})
"""Frameworks whose wrappers have an attribute ``optimizer`` and add nothing to its update."""


def without_wrapper(optimizer: T) -> T | Optimizer:
    """Return the optimizer inside a wrapper of Accelerate or Lightning; anything else as it is.

    Only wrappers that are known to add nothing to the update are unwrapped: Lookahead, for example, has an attribute
    ``optimizer`` too, but an update of its own.
    """
    inner: T | Optimizer = optimizer
    while any(base.__module__.partition(".")[0] in _FRAMEWORKS for base in type(inner).__mro__):
        wrapped = getattr(inner, "optimizer", None)
        if not isinstance(wrapped, Optimizer) or wrapped is inner:
            break
        inner = wrapped
    return inner
