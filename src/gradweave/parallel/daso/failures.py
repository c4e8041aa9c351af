"""What is said when nodes cannot go on together."""

from __future__ import annotations

from collections.abc import Sequence

from gradweave.errors import LostNodeError
from gradweave.parallel.daso.consensus import OVERFLOW, Verdict
from gradweave.parallel.daso.topology import Topology


def why_to_stop(verdict: Verdict, topology: Topology, step: int) -> LostNodeError | None:
    """The error for an exchange that did not count, if this rank must stop whatever its user wants."""
    own = topology.ranks[topology.node]
    if verdict.broken == OVERFLOW:
        message = "is too small for the sum of what nodes sent; restart with payload='bfloat16'"
        return LostNodeError(f"payload='float16' {message} (step {step})", step=step)
    if verdict.broken >= 0:
        ranks = topology.ranks[verdict.broken]
        message = (
            f"node {verdict.broken} ({listed(ranks)}) has weights that are not finite at step {step}; restart from a "
            "checkpoint, with a smaller learning rate or with clipping"
        )
        return LostNodeError(message, ranks=ranks, step=step)
    if not verdict.alive:
        message = (
            f"the node that hosts the store is lost at step {step}, so that nodes cannot agree any more; restart "
            "from a checkpoint"
        )
        return LostNodeError(message, ranks=topology.ranks[0], step=step)
    if topology.node not in verdict.alive:
        message = (
            f"this node ({listed(own)}) was too late at step {step}, and the others have gone on without it; restart "
            "from a checkpoint, or give a longer timeout"
        )
        return LostNodeError(message, ranks=own, step=step)
    return None


def who_is_lost(lost: Sequence[int], step: int) -> str:
    """The ranks that did not answer, or what else it was."""
    return f"{listed(lost)} lost at step {step}" if lost else f"the link was cut at step {step}, with nobody lost"


def stopped(lost: Sequence[int], step: int) -> LostNodeError:
    """The error where the user wants to stop if anybody is lost."""
    message = (
        f"{who_is_lost(lost, step)}: that exchange counts for nobody, and weights are whole; restart from a "
        'checkpoint, or give on_failure="continue"'
    )
    return LostNodeError(message, ranks=tuple(lost), step=step)


def listed(ranks: Sequence[int]) -> str:
    """Ranks, as a text."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
