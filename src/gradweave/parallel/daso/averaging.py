"""Averages of gradients: over the ranks of a node in each step, and over all nodes in the warm-up and cool-down."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from gradweave._compat.foreach import copy_all
from gradweave._runtime.lendable_ranks import lendable_ranks
from gradweave.parallel.daso.exchange import Exchange
from gradweave.parallel.daso.flat_buffers import Layout, as_real
from gradweave.parallel.daso.node_group import NodeGroup, Purpose


class GradientAveraging:
    """Averages the gradients of a backward, at its end.

    Args:
        exchange: Exchanges with other nodes.
        node: The ranks of this node.
        weights: Trained parameters.
        is_own: Whether gradients are averaged here, and not by the user's wrapper.
    """

    def __init__(self, exchange: Exchange, node: NodeGroup, weights: Layout, *, is_own: bool) -> None:
        self._exchange = exchange
        self._node = node
        self._weights = weights
        self._is_own = is_own

    @torch.no_grad()
    def average(self, params: Sequence[torch.Tensor], fresh: Sequence[int], step: int) -> None:
        """Average gradients over the ranks that train.

        Args:
            params: All parameters, trained or not.
            fresh: For each parameter, whether it has a new gradient.
            step: The present step.
        """
        across = self._exchange.averages_gradients(step)
        if not self._is_own or (self._node.is_single and not across):
            return
        pool, active = self._exchange.pool, 1
        vectors = self._weights.pack([p.grad for p in self._weights.tensors], pool=pool)
        if not self._node.is_single:
            meeting = self._node.gather(Purpose.BACKWARD, step, fresh, vectors, active=True)
            fresh, active = meeting.fresh, len(meeting.active)
        if across:
            fresh, active = self.across_nodes(vectors, fresh, active, step)
        ids = {id(p) for p, count in zip(params, fresh, strict=True) if count}
        means = self._weights.views(vectors)
        averaged = [(p, mean) for p, mean in zip(self._weights.tensors, means, strict=True) if id(p) in ids]
        for vector in vectors:
            vector.div_(active)
        for p, _ in averaged:
            # Only other ranks have used this parameter: it is to be updated by the mean here too.
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        copy_all([as_real(p.grad) for p, _ in averaged if p.grad is not None], [mean for _, mean in averaged])
        pool.give(vectors)

    def across_nodes(
        self, vectors: list[torch.Tensor], fresh: Sequence[int], active: int, step: int
    ) -> tuple[Sequence[int], int]:
        """Sum gradients of this node's ranks over nodes, in place; if a node is lost meanwhile, they stay as they are.

        Args:
            vectors: Sums of gradients over this node.
            fresh: For each parameter, the number of this node's ranks that have a new gradient.
            active: Number of this node's ranks that train.
            step: The present step.

        Returns:
            The same two numbers for all ranks in the sum.
        """
        sums = self._exchange.average(vectors, [active, *fresh], step)
        return (fresh, active) if sums is None else ([round(count) for count in sums[1:]], round(sums[0]))


def lend_ranks(optimizer: Optimizer, group: ProcessGroup | None, undo: ExitStack) -> bool:
    """Lend the ranks of a node to an optimizer that averages statistics by itself; return whether it is one.

    Such statistics must be averaged over the ranks that average gradients: over more, nodes would not be independent;
    over fewer, the weights of a node's ranks would diverge.

    Args:
        optimizer: The user's.
        group: The ranks of this node; None for a single one.
        undo: Takes them back when it is closed.
    """
    ranks = lendable_ranks(optimizer)
    if ranks is None:
        return False
    ranks.lend(group, lender="DASO")
    undo.callback(ranks.take_back)
    return True
