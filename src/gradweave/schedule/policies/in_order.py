"""Stock order, as in frameworks today."""

from __future__ import annotations

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.one_device import MAIN, backward, forward, stream, updates
from gradweave.schedule.schedule import Schedule


def in_order(graph: TaskGraph) -> Schedule:
    """Run forward, backward and update one after the other on one stream."""
    order: list[int] = []
    for step in range(graph.steps):
        order += forward(graph, step) + backward(graph, step) + updates(graph, step)
    order += forward(graph, graph.steps)
    return Schedule(graph, (stream(MAIN, order),), policy="in_order")
