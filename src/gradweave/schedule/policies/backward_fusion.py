"""Optimizer fusion with backward (Jiang et al. 2021)."""

from __future__ import annotations

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.one_device import MAIN, forward, stream
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Kind


def backward_fusion(graph: TaskGraph) -> Schedule:
    """Update each layer right after its gradients, so that its weight gradient is freed at once.

    The update follows X too, since the input gradient is computed with the old weights.
    """
    index = graph.index
    order: list[int] = []
    for step in range(graph.steps):
        order += forward(graph, step)
        for layer in reversed(range(graph.layers)):
            order += [index[kind, layer, 0, step] for kind in (Kind.W, Kind.X, Kind.U)]
    order += forward(graph, graph.steps)
    return Schedule(graph, (stream(MAIN, order),), policy="backward_fusion")
