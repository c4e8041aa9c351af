"""What is sent between nodes, and what becomes of the weights when it has arrived."""

from __future__ import annotations

from typing import Protocol

import torch

from gradweave.parallel.daso.flat_buffers import Layout, Pool, Vectors


class Rule(Protocol):
    """A way to merge."""

    sends_first: bool
    """Whether a merge that is due together with a send comes behind it."""
    anchor: list[torch.Tensor]
    """What all nodes have in common, as vectors; empty where the rule has no such thing."""

    def agree(self, layout: Layout) -> None:
        """Told that the weights are now the same on all nodes."""

    def extend(self, layout: Layout) -> None:
        """Told that weights have come in which nobody has trained yet."""

    def payload(self, layout: Layout, pool: Pool) -> list[torch.Tensor]:
        """What this node would send, in full precision."""

    def merge(
        self, layout: Layout, sent: Vectors, total: Vectors, nodes: int, staleness: int | None, pool: Pool
    ) -> None:
        """Applies the sum of what ``nodes`` nodes sent, ``staleness`` steps ago; None where nobody went on since."""

    def settle(self, layout: Layout, total: Vectors, nodes: int) -> None:
        """Makes the weights of all nodes the same, bit for bit, from a sum sent in full precision."""


class DeltaRule:
    """What each node has changed since they last agreed: x + mean(sent) - own sent, so that no progress is lost.

    All nodes have the same anchor: the sum of what all have sent so far. A node sends its distance from
    it. What rounding to 16 bits leaves behind stays in the node's own weights and is part of what it
    sends next: error feedback without a buffer for it, and weights are never rounded.
    """

    sends_first = False

    def __init__(self) -> None:
        self.anchor: list[torch.Tensor] = []

    def agree(self, layout: Layout) -> None:
        """The weights are the anchor."""
        self.anchor = layout.pack()

    def payload(self, layout: Layout, pool: Pool) -> list[torch.Tensor]:
        """The distance from the anchor."""
        return [x.sub_(a) for x, a in zip(layout.pack(pool=pool), self.anchor, strict=True)]

    def extend(self, layout: Layout) -> None:
        """They are the same on all nodes, and so belong to the anchor as they are."""
        before, self.anchor = self.anchor, layout.pack()
        for a, old in zip(self.anchor, before, strict=False):
            a[: old.numel()].copy_(old)

    def merge(
        self, layout: Layout, sent: Vectors, total: Vectors, nodes: int, staleness: int | None, pool: Pool
    ) -> None:
        """Moves by what the others did, and the anchor by what all did."""
        del staleness
        step = self._advance(total, nodes, pool)
        layout.add([m.sub_(own) for m, own in zip(step, sent, strict=True)])
        pool.give(step)

    def settle(self, layout: Layout, total: Vectors, nodes: int) -> None:
        """The anchor, once it has moved by what all did, is the result."""
        self._advance(total, nodes, Pool())
        layout.store([a[: t.numel()] for t, a in zip(total, self.anchor, strict=False)])

    def _advance(self, total: Vectors, nodes: int, pool: Pool) -> list[torch.Tensor]:
        """Those that have come in since this was sent lie behind what it moves."""
        mean = [pool.copy([t], a.dtype)[0].div_(nodes) for t, a in zip(total, self.anchor, strict=False)]
        for a, m in zip(self.anchor, mean, strict=False):
            a[: m.numel()].add_(m)
        return mean


class PaperRule:
    """Weights themselves, merged as published: x = (2 S x + sum of sent) / (2 S + P)."""

    sends_first = True

    def __init__(self) -> None:
        self.anchor: list[torch.Tensor] = []

    def agree(self, layout: Layout) -> None:
        """Nothing to remember."""

    def extend(self, layout: Layout) -> None:
        """Nothing to remember."""

    def payload(self, layout: Layout, pool: Pool) -> list[torch.Tensor]:
        """The weights."""
        return layout.pack(pool=pool)

    def merge(
        self, layout: Layout, sent: Vectors, total: Vectors, nodes: int, staleness: int | None, pool: Pool
    ) -> None:
        """Weighs this node's weights by the steps it took meanwhile; with none, the mean."""
        del sent
        if staleness is None:
            self.settle(layout, total, nodes)
            return
        own = 2.0 * staleness if staleness else 1.0
        vectors = layout.pack(pool=pool)
        layout.store([x.mul_(own).add_(t).div_(own + nodes) for x, t in zip(vectors, total, strict=True)])
        pool.give(vectors)

    def settle(self, layout: Layout, total: Vectors, nodes: int) -> None:
        """The mean."""
        layout.store([t.to(x.dtype).div(nodes) for x, t in zip(layout.zeros(), total, strict=True)])
