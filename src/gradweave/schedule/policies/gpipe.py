"""GPipe (Huang et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterator

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.stage_programs import Action, check_in_flight, run_programs
from gradweave.schedule.schedule import Schedule


def gpipe(graph: TaskGraph, *, max_in_flight: int | None = None) -> Schedule:
    """Run all forwards, then all backwards; with a cap, in rounds of that many micro-batches.

    Args:
        graph: An unplaced pipeline graph.
        max_in_flight: Micro-batches per round (default: all of them in one).
    """
    check_in_flight(max_in_flight)

    def program(_: int, microbatches: range) -> Iterator[Action]:
        yield from (("F", 0, microbatch) for microbatch in microbatches)
        yield from (("B", 0, microbatch) for microbatch in microbatches)

    return run_programs(graph, program, policy="gpipe", round_size=max_in_flight)
