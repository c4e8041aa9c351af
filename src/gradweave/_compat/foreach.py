"""Private names of torch: operations on many tensors at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]

FOREACH_ZERO = torch.ops.aten._foreach_zero_.default
"""The operation behind :func:`zero_all`, as dispatch sees it."""


def multiply_all(tensors: Tensors, factor: float | torch.Tensor) -> None:
    """Multiply each of many tensors by one number, in place."""
    torch._foreach_mul_(list(tensors), factor)


def multiply_each(tensors: Tensors, factors: Tensors) -> list[torch.Tensor]:
    """Return each of many tensors times a number of its own."""
    return list(torch._foreach_mul(list(tensors), list(factors)))


def multiplied(tensors: Tensors, factor: float | torch.Tensor) -> list[torch.Tensor]:
    """Return many tensors times one number."""
    return list(torch._foreach_mul(list(tensors), factor))


def add_all(tensors: Tensors, others: Tensors, alpha: float | torch.Tensor = 1.0) -> None:
    """Add to each of many tensors another one times a number, in place."""
    torch._foreach_add_(list(tensors), list(others), alpha=alpha)  # type: ignore[arg-type]


def norms(tensors: Tensors) -> list[torch.Tensor]:
    """Return the norm of each of many tensors."""
    return list(torch._foreach_norm(list(tensors)))


def zero_all(tensors: Tensors) -> None:
    """Set many tensors to zero, in place."""
    if tensors:
        torch._foreach_zero_(list(tensors))


def asked_by_grad_scaler() -> bool:
    """Return whether torch's GradScaler reads the caller's property."""
    return sys._getframe(2).f_globals.get("__name__") == "torch.amp.grad_scaler"


def norms_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each of many tensors, in one call."""
    return list(torch._foreach_norm(tensors))


def add_one(tensors: list[torch.Tensor]) -> None:
    """Add 1 to each of many tensors, in one call."""
    torch._foreach_add_(tensors, 1)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target; on a GPU in few kernels."""
    if targets:
        torch._foreach_copy_(targets, sources)
