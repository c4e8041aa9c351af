"""Errors of nodes that cannot go on together."""

from __future__ import annotations

from collections.abc import Sequence

from gradweave.errors import LostPeerError
from gradweave.parallel.daso.consensus import OVERFLOW, Verdict
from gradweave.parallel.daso.topology import Topology


def reason_to_stop(verdict: Verdict, topology: Topology, step: int) -> LostPeerError | None:
    """Return the error of an exchange that did not count; None if ``on_failure`` decides whether to stop."""
    own = topology.ranks[topology.node]
    if verdict.broken == OVERFLOW:
        message = "is too small for the sum of what nodes sent; restart with payload='bfloat16'"
        return LostPeerError(f"payload='float16' {message} (step {step})", step=step)
    if verdict.broken >= 0:
        ranks = topology.ranks[verdict.broken]
        message = (
            f"node {verdict.broken} ({listed(ranks)}) has weights that are not finite at step {step}; restart from a "
            "checkpoint, with a smaller learning rate or with clipping"
        )
        return LostPeerError(message, ranks=ranks, step=step)
    if not verdict.alive:
        message = (
            f"the node that hosts the store is lost at step {step}, so that nodes can no longer agree; restart from a "
            "checkpoint"
        )
        return LostPeerError(message, ranks=topology.ranks[0], step=step)
    if topology.node not in verdict.alive:
        message = (
            f"this node ({listed(own)}) was too late at step {step}, and the others have gone on without it; restart "
            "from a checkpoint, or give a longer timeout"
        )
        return LostPeerError(message, ranks=own, step=step)
    return None


def lost_nodes(ranks: Sequence[int], step: int) -> LostPeerError:
    """Return the error of a failed exchange under ``on_failure="raise"``."""
    message = (
        f"{describe_lost(ranks, step)}: that exchange counts for no node, and weights are whole; restart from a "
        'checkpoint, or give on_failure="continue"'
    )
    return LostPeerError(message, ranks=tuple(ranks), step=step)


def lost_in_node(topology: Topology, step: int) -> LostPeerError:
    """Return the error of lost contact inside a node, which does not tell which of its ranks is lost."""
    others = tuple(rank for rank in topology.ranks[topology.node] if rank != topology.rank)
    message = (
        f"a rank of this node is lost, of {listed(others)}, at step {step}: the node cannot go on; restart from a "
        "checkpoint"
    )
    return LostPeerError(message, ranks=others, step=step)


def describe_lost(ranks: Sequence[int], step: int) -> str:
    """Return who was lost when an exchange failed: ranks, or only the link."""
    return f"{listed(ranks)} lost at step {step}" if ranks else f"the link was cut at step {step}, with no rank lost"


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``"rank 3"``, ``"ranks 2, 3"``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
