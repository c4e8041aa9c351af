"""ZB-H1 (Qi et al. 2023): 1F1B with weight gradients held back to fill the drain."""

from __future__ import annotations

from collections.abc import Iterator

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.stage_programs import Action, check_in_flight, run_programs
from gradweave.schedule.schedule import Schedule


def zb_h1(graph: TaskGraph, *, max_in_flight: int | None = None) -> Schedule:
    """Run 1F1B on input gradients; each stage holds back as many weight gradients as stages precede it.

    No stage holds more micro-batches than the first one of 1F1B.

    Args:
        graph: An unplaced pipeline graph.
        max_in_flight: Most micro-batches that a stage holds (default: the number of stages).
    """
    check_in_flight(max_in_flight)
    stages = graph.cluster.devices
    cap = min(max_in_flight or stages, stages)

    def program(stage: int, microbatches: range) -> Iterator[Action]:
        ahead = min(stages - stage, cap, len(microbatches))
        held_back = min(stage, cap - ahead)
        yield from (("F", 0, microbatch) for microbatch in microbatches[:ahead])
        for i, microbatch in enumerate(microbatches):
            yield "X", 0, microbatch
            if i >= held_back:
                yield "W", 0, microbatches[i - held_back]
            if i + ahead < len(microbatches):
                yield "F", 0, microbatches[i + ahead]
        yield from (("W", 0, mb) for mb in microbatches[max(0, len(microbatches) - held_back) :])

    return run_programs(graph, program, policy="zb_h1")
