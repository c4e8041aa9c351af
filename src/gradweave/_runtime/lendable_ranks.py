"""Optimizers that average over ranks by themselves, as other techniques see them."""

from __future__ import annotations

from typing import Protocol

from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from gradweave._runtime.claims import Technique, holders_of


class LendableRanks(Protocol):
    """The ranks that an optimizer averages statistics of its own over."""

    def lend(self, group: ProcessGroup | None, *, lender: str) -> None:
        """Average over the ranks of a technique that averages gradients over them.

        Args:
            group: The technique's ranks; None for this one alone.
            lender: The technique, for messages.

        Raises:
            ArgumentError: If the user gave the optimizer other ranks.
            UnsupportedError: If another technique has lent its ranks already.
        """

    def take_back(self) -> None:
        """Undo :meth:`lend`."""


class StatisticsOptimizer(Protocol):
    """What every holder of an :attr:`~gradweave._runtime.claims.Technique.EVA` claim is."""

    @property
    def ranks(self) -> LendableRanks | None:
        """The ranks that it averages statistics over; None if it needs nothing but gradients."""


def lendable_ranks(optimizer: Optimizer) -> LendableRanks | None:
    """Return the ranks that an optimizer averages over by itself; None if it does not, as most optimizers."""
    holders: list[StatisticsOptimizer] = holders_of(optimizer, Technique.EVA)
    return next((holder.ranks for holder in holders), None)
