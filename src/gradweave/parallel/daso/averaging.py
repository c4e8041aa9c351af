"""Averages of gradients: over the ranks of a node in each step, and over all nodes while these stay together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradweave._compat.eager import copy_all
from gradweave.parallel.daso.exchange import Exchange
from gradweave.parallel.daso.flat_buffers import Layout, as_real
from gradweave.parallel.daso.node_group import Call, Mates


class Averaging:
    """Averages the gradients of a backward, at its end.

    Args:
        exchange: With other nodes.
        mates: The ranks of this node.
        weights: Trained parameters.
        ours: Whether gradients are averaged here, and not by a wrapper of the user's.
    """

    def __init__(self, exchange: Exchange, mates: Mates, weights: Layout, *, ours: bool) -> None:
        self._exchange = exchange
        self._mates = mates
        self._weights = weights
        self._ours = ours

    @torch.no_grad()
    def average(self, params: Sequence[torch.Tensor], flags: Sequence[int], step: int) -> None:
        """Average gradients over the ranks that train.

        Args:
            params: All parameters, trained or not.
            flags: For each parameter, whether it has a new gradient.
            step: The present step.
        """
        across = self._exchange.averages_gradients(step)
        if not self._ours or (self._mates.alone and not across):
            return
        pool, active = self._exchange.pool, 1
        vectors = self._weights.pack([p.grad for p in self._weights.tensors], pool=pool)
        if not self._mates.alone:
            met = self._mates.gather(Call.BACKWARD, step, flags, vectors, active=True)
            flags, active = met.flags, len(met.active)
        if across:
            flags, active = self.across(vectors, flags, active, step)
        fresh = {id(p) for p, flag in zip(params, flags, strict=True) if flag}
        averaged = [pair for pair in zip(self._weights.tensors, self._weights.views(vectors), strict=True)
                    if id(pair[0]) in fresh]  # fmt: skip
        for vector in vectors:
            vector.div_(active)
        for p, _ in averaged:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        copy_all([as_real(p.grad) for p, _ in averaged if p.grad is not None], [mean for _, mean in averaged])
        pool.give(vectors)

    def across(
        self, vectors: list[torch.Tensor], flags: Sequence[int], active: int, step: int
    ) -> tuple[Sequence[int], int]:
        """Sum over nodes too; where one is lost on the way, the node's own sum stands."""
        sums = self._exchange.average(vectors, [active, *flags], step)
        return (flags, active) if sums is None else ([round(flag) for flag in sums[1:]], round(sums[0]))
