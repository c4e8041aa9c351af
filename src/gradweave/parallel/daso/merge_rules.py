"""Merge rules: what nodes send each other, and how the sum changes their weights."""

from __future__ import annotations

from typing import Protocol

import torch

from gradweave.parallel.daso.flat_buffers import Layout, Pool, Vectors


class Rule(Protocol):
    """A merge rule."""

    sends_first: bool
    """Whether, if a merge and a send are due in the same step, the send comes first."""
    anchor: list[torch.Tensor]
    """Vectors that are equal on all nodes; empty if the rule needs none."""

    def agree(self, layout: Layout) -> None:
        """Note that the weights are now the same on all nodes."""

    def extend(self, layout: Layout) -> None:
        """Note that weights were appended, and are not trained yet."""

    def payload(self, layout: Layout, pool: Pool) -> list[torch.Tensor]:
        """Return the vectors to send, in full precision."""

    def merge(
        self, layout: Layout, sent: Vectors, total: Vectors, nodes: int, staleness: int | None, pool: Pool
    ) -> None:
        """Merge a sum into the weights.

        Args:
            layout: The weights.
            sent: The vectors that this node sent.
            total: The sum of those of all nodes.
            nodes: Number of nodes in the sum.
            staleness: Steps since the send; None if no node has trained since.
            pool: Memory for intermediate vectors.
        """

    def settle(self, layout: Layout, total: Vectors, nodes: int) -> None:
        """Make the weights of all nodes equal, bit for bit, from a sum that was sent in full precision."""


class DeltaRule:
    """The default rule, x + mean(sent) - own sent, which loses no progress.

    All nodes have the same anchor: the sum of everything sent so far. A node sends its distance from the anchor.
    What rounding to 16 bits cuts off stays in the node's own weights and is part of what it sends next: this is error
    feedback without a buffer, and weights are never rounded.
    """

    sends_first = False

    def __init__(self) -> None:
        self.anchor: list[torch.Tensor] = []

    def agree(self, layout: Layout) -> None:
        """Make the weights the anchor."""
        self.anchor = layout.pack()

    def payload(self, layout: Layout, pool: Pool) -> list[torch.Tensor]:
        """Return the distance from the anchor."""
        return [x.sub_(a) for x, a in zip(layout.pack(pool=pool), self.anchor, strict=True)]

    def extend(self, layout: Layout) -> None:
        """Append the new weights to the anchor: they are the same on all nodes."""
        before, self.anchor = self.anchor, layout.pack()
        for a, old in zip(self.anchor, before, strict=False):
            a[: old.numel()].copy_(old)

    def merge(
        self, layout: Layout, sent: Vectors, total: Vectors, nodes: int, staleness: int | None, pool: Pool
    ) -> None:
        """Move the weights by the progress of the other nodes, and the anchor by that of all."""
        del staleness
        step = self._advance(total, nodes, pool)
        layout.add([m.sub_(own) for m, own in zip(step, sent, strict=True)])
        pool.give(step)

    def settle(self, layout: Layout, total: Vectors, nodes: int) -> None:
        """Move the anchor by the progress of all nodes, and set the weights to it."""
        self._advance(total, nodes, Pool())
        layout.store([a[: t.numel()] for t, a in zip(total, self.anchor, strict=False)])

    def _advance(self, total: Vectors, nodes: int, pool: Pool) -> list[torch.Tensor]:
        """Move the anchor; return by how much."""
        # Parameters that were added after the send are appended, so that they are unaffected.
        mean = [pool.copy([t], a.dtype)[0].div_(nodes) for t, a in zip(total, self.anchor, strict=False)]
        for a, m in zip(self.anchor, mean, strict=False):
            a[: m.numel()].add_(m)
        return mean


class PaperRule:
    """The published rule, x = (2 S x + sum(sent)) / (2 S + P): S steps after the send, P nodes."""

    sends_first = True

    def __init__(self) -> None:
        self.anchor: list[torch.Tensor] = []

    def agree(self, layout: Layout) -> None:
        """Do nothing: there is no anchor."""

    def extend(self, layout: Layout) -> None:
        """Do nothing: there is no anchor."""

    def payload(self, layout: Layout, pool: Pool) -> list[torch.Tensor]:
        """Return the weights."""
        return layout.pack(pool=pool)

    def merge(
        self, layout: Layout, sent: Vectors, total: Vectors, nodes: int, staleness: int | None, pool: Pool
    ) -> None:
        """Weigh this node's weights by the steps since the send; if no node has trained since, take the mean."""
        del sent
        if staleness is None:
            self.settle(layout, total, nodes)
            return
        own = 2.0 * staleness if staleness else 1.0
        vectors = layout.pack(pool=pool)
        layout.store([x.mul_(own).add_(t).div_(own + nodes) for x, t in zip(vectors, total, strict=True)])
        pool.give(vectors)

    def settle(self, layout: Layout, total: Vectors, nodes: int) -> None:
        """Set the weights to the mean."""
        layout.store([t.to(x.dtype).div(nodes) for x, t in zip(layout.zeros(), total, strict=True)])
