"""Optimizers that average over ranks by themselves: under DASO, over those of the node."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from gradweave.optim.base import VectorOptimizer


def lend(optimizer: Optimizer, group: Any, undo: ExitStack) -> bool:
    """Has an optimizer that averages what gradients do not carry do so over the ranks that average gradients.

    Args:
        optimizer: The user's; most are none of those.
        group: The ranks of this node; None where there is only one.
        undo: Told how to take it back.

    Returns:
        Whether it is one of those.
    """
    ranks = optimizer.ranks if isinstance(optimizer, VectorOptimizer) else None
    if ranks is None:
        return False
    ranks.lend(group, lender="DASO")
    undo.callback(ranks.take_back)
    return True
