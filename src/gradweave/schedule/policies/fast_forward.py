"""Gradient fast-forwarding (Oh et al. 2022), made work-conserving."""

from __future__ import annotations

from collections.abc import Callable

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.list_scheduling import greedy
from gradweave.schedule.policies.stage_programs import check_in_flight
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Kind
from gradweave.schedule.transforms import contiguous, place

_RANK = {Kind.U: 0, Kind.X: 1, Kind.F: 2, Kind.W: 3, Kind.C: 4}


def fast_forward(graph: TaskGraph, *, max_in_flight: int | None = None) -> Schedule:
    """Run input gradients first, then forwards; weight gradients fill the time left idle.

    Args:
        graph: An unplaced pipeline graph.
        max_in_flight: Most micro-batches that have entered and still lack a weight gradient (default: no bound).
    """
    placement = contiguous(graph.layers, graph.cluster.devices)
    return input_gradients_first(graph, placement, max_in_flight, "fast_forward")


def input_gradients_first(
    graph: TaskGraph, placement: Callable[[int], int], max_in_flight: int | None, policy: str
) -> Schedule:
    """Return the fast-forwarding schedule for any placement of layers."""
    check_in_flight(max_in_flight)
    graph = place(graph, placement)
    urgency = [(task.step, _RANK[task.kind], task.microbatch, task.layer) for task in graph.tasks]
    return greedy(graph, urgency, waits=admission(graph, max_in_flight), policy=policy)


def admission(graph: TaskGraph, max_in_flight: int | None) -> tuple[tuple[int, int], ...]:
    """Return waits that let a micro-batch enter once the one ``max_in_flight`` before it has all weight gradients."""
    if max_in_flight is None:
        return ()
    index = graph.index
    return tuple(
        (index[Kind.F, 0, microbatch, step], index[Kind.W, layer, microbatch - max_in_flight, step])
        for step in range(graph.steps)
        for microbatch in range(max_in_flight, graph.microbatches)
        for layer in range(graph.layers)
    )
