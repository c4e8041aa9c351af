"""Stage programs, shared by the pipeline policies of fixed order, and their expansion into tasks.

A program is a list of actions (what, chunk, micro-batch), where what is F, X, W, or B for X and W together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from gradweave.errors import ArgumentError
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.lanes import Lane
from gradweave.schedule.list_scheduling import link_lanes
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Kind
from gradweave.schedule.transforms import contiguous, device_name, place

Action = tuple[str, int, int]
Program = Callable[[int, range], Iterable[Action]]
"""Maps a stage's number and the micro-batches of a round to the stage's actions."""


def check_in_flight(max_in_flight: int | None) -> None:
    """Raise ArgumentError for a cap that admits no micro-batch."""
    if max_in_flight is not None and max_in_flight < 1:
        raise ArgumentError("max_in_flight", max_in_flight, "give at least 1 micro-batch")


def run_programs(
    graph: TaskGraph, program: Program, *, policy: str, chunks: int = 1, round_size: int | None = None
) -> Schedule:
    """Return the schedule in which each stage holds ``chunks`` runs of layers, dealt out in turn, and runs its program.

    Args:
        graph: An unplaced pipeline graph.
        program: Gives each stage's actions for the micro-batches of a round.
        policy: Name for the schedule.
        chunks: Runs of layers per stage.
        round_size: Micro-batches per round; a round ends before the next begins.
    """
    stages = graph.cluster.devices
    if graph.layers < stages * chunks:
        raise ArgumentError(
            "chunks", chunks, f"give at most {graph.layers // stages}: {graph.layers} layers on {stages} stages"
        )
    chunk_of = contiguous(graph.layers, stages * chunks)
    graph = place(graph, lambda layer: chunk_of(layer) % stages)
    members: list[list[int]] = [[] for _ in range(stages * chunks)]
    for layer in range(graph.layers):
        members[chunk_of(layer)].append(layer)
    size = round_size or graph.microbatches
    rounds = [range(start, min(start + size, graph.microbatches)) for start in range(0, graph.microbatches, size)]
    lanes = []
    for stage in range(stages):
        own = members[stage::stages]
        order: list[int] = []
        for step in range(graph.steps):
            for microbatches in rounds:
                for what, chunk, microbatch in program(stage, microbatches):
                    order += _tasks_of(graph, what, own[chunk], microbatch, step)
            order += graph.find(Kind.U, [layer for chunk_layers in own for layer in chunk_layers], step)
        if graph.next_forward:
            for microbatches in rounds:
                for what, chunk, microbatch in program(stage, microbatches):
                    if what == Kind.F:
                        order += _tasks_of(graph, what, own[chunk], microbatch, graph.steps)
        lanes.append(Lane(device_name(stage), device_name(stage), tuple(order)))
    return Schedule(graph, (*lanes, *link_lanes(graph)), policy=policy)


def _tasks_of(graph: TaskGraph, what: str, layers: list[int], microbatch: int, step: int) -> Iterator[int]:
    """Return the tasks of an action, layer by layer."""
    index = graph.index
    if what == Kind.F:
        return (index[Kind.F, layer, microbatch, step] for layer in layers)
    kinds = (Kind.W, Kind.X) if what == "B" else (Kind(what),)
    return (index[kind, layer, microbatch, step] for layer in reversed(layers) for kind in kinds)
