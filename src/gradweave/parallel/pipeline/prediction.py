"""What a program would take, layer by layer, on devices that are not there yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradweave.parallel.pipeline.programs import Program
from gradweave.schedule.builders import pipeline
from gradweave.schedule.costs import Costs
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.lanes import Lane
from gradweave.schedule.links import Link
from gradweave.schedule.list_scheduling import link_lanes
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Kind
from gradweave.schedule.timeline import Timeline
from gradweave.schedule.transforms import device_name, place


def schedule_of(program: Program, costs: Costs, runs: Sequence[range], *, link: Link = Link()) -> Schedule:
    """A program spelled out as the tasks of single layers.

    Args:
        program: For stages.
        costs: Of layers.
        runs: The layers of each stage.
        link: Between ranks.
    """
    ranks = len(program.ranks)
    graph = pipeline(costs, stages=ranks, microbatches=program.microbatches, link=link)
    stage_of = {layer: stage for stage, run in enumerate(runs) for layer in run}
    graph = place(graph, lambda layer: program.rank_of[stage_of[layer]])
    lanes = []
    for rank, actions in enumerate(program.ranks):
        order = [task for what, stage, microbatch in actions for task in _tasks(graph, what, runs[stage], microbatch)]
        order += graph.find(Kind.U, [layer for stage in program.stages_of(rank) for layer in runs[stage]], 0)
        lanes.append(Lane(device_name(rank), device_name(rank), tuple(order)))
    return Schedule(graph, (*lanes, *link_lanes(graph)), policy=program.policy)


def predict(program: Program, costs: Costs, runs: Sequence[range], *, link: Link = Link()) -> Timeline:
    """The timeline of one step."""
    return replace(schedule_of(program, costs, runs, link=link).simulate(), title=program.policy)


def _tasks(graph: TaskGraph, what: str, layers: range, microbatch: int) -> Iterator[int]:
    index = graph.index
    if what == "F":
        return (index[Kind.F, layer, microbatch, 0] for layer in layers)
    kinds = (Kind.W, Kind.X) if what == "B" else (Kind(what),)
    return (index[kind, layer, microbatch, 0] for layer in reversed(layers) for kind in kinds)
