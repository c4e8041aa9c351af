"""Interleaved 1F1B (Narayanan et al. 2021): several runs of layers per stage."""

from __future__ import annotations

from collections.abc import Iterator

from gradweave.errors import ArgumentError
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.stage_programs import Action, check_in_flight, run_programs
from gradweave.schedule.schedule import Schedule


def interleaved(graph: TaskGraph, *, chunks: int = 2, max_in_flight: int | None = None) -> Schedule:
    """Run 1F1B over ``chunks`` runs of layers per stage, in groups of as many micro-batches as stages.

    Args:
        graph: An unplaced pipeline graph.
        chunks: Runs of layers per stage.
        max_in_flight: Micro-batches per round, a multiple of the stages (default: all of them in one).
    """
    check_in_flight(max_in_flight)
    stages = graph.cluster.devices
    if chunks < 1:
        raise ArgumentError("chunks", chunks, "give at least 1")
    for argument, value in (("microbatches", graph.microbatches), ("max_in_flight", max_in_flight)):
        if value is not None and value % stages:
            raise ArgumentError(argument, value, f"interleaved needs a multiple of the {stages} stages")

    def program(stage: int, microbatches: range) -> Iterator[Action]:
        total = len(microbatches) * chunks
        ahead = min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages)

        def turn(number: int) -> tuple[int, int]:
            """Return the chunk and the micro-batch of a stage's n-th forward."""
            group, within = divmod(number, stages * chunks)
            chunk, offset = divmod(within, stages)
            return chunk, microbatches[group * stages + offset]

        def backward(number: int) -> Action:
            chunk, microbatch = turn(number)
            return "B", chunks - 1 - chunk, microbatch

        yield from (("F", *turn(number)) for number in range(ahead))
        for number in range(total - ahead):
            yield "F", *turn(number + ahead)
            yield backward(number)
        yield from (backward(number) for number in range(total - ahead, total))

    return run_programs(graph, program, policy="interleaved", chunks=chunks, round_size=max_in_flight)
