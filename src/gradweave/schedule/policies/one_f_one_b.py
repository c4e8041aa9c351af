"""1F1B (Narayanan et al. 2019), with the pipeline flushed at the end of a step."""

from __future__ import annotations

from collections.abc import Iterator

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.stage_programs import Action, check_in_flight, run_programs
from gradweave.schedule.schedule import Schedule


def one_f_one_b(graph: TaskGraph, *, max_in_flight: int | None = None) -> Schedule:
    """Alternate one forward and one backward, after as many forwards as there are stages to come.

    Args:
        graph: An unplaced pipeline graph.
        max_in_flight: Most micro-batches of which a stage has run the forward but not the backward.
    """
    check_in_flight(max_in_flight)
    stages = graph.cluster.devices

    def program(stage: int, microbatches: range) -> Iterator[Action]:
        ahead = min(stages - stage, max_in_flight or stages, len(microbatches))
        yield from (("F", 0, microbatch) for microbatch in microbatches[:ahead])
        for i, microbatch in enumerate(microbatches):
            yield "B", 0, microbatch
            if i + ahead < len(microbatches):
                yield "F", 0, microbatches[i + ahead]

    return run_programs(graph, program, policy="one_f_one_b")
