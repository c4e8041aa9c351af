"""Data parallel without the barrier between steps."""

from __future__ import annotations

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.lanes import Lane
from gradweave.schedule.list_scheduling import link_lanes
from gradweave.schedule.policies.ddp import DEFAULT_BUCKET_BYTES
from gradweave.schedule.policies.one_device import MAIN, backward, forward, stream, updates_before_use
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.transforms import bucket


def no_barrier(graph: TaskGraph, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Schedule:
    """Like ddp, but the updates of a message come just before the next forward of its first layer.

    Args:
        graph: A graph of replicas.
        bucket_bytes: As for ddp.
    """
    graph = bucket(graph, bucket_bytes)
    return Schedule(graph, (unbarriered_stream(graph), *link_lanes(graph)), policy="no_barrier")


def unbarriered_stream(graph: TaskGraph) -> Lane:
    """Return a stream with backward in stock order and updates that wait for their own layer's gradient only."""
    order = forward(graph, 0)
    for step in range(graph.steps):
        order += backward(graph, step) + updates_before_use(graph, step)
    return stream(MAIN, order)
