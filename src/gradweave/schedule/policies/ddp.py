"""Plain data parallel, as DistributedDataParallel does it."""

from __future__ import annotations

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.list_scheduling import link_lanes
from gradweave.schedule.policies.one_device import MAIN, backward, forward, stream, updates
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.transforms import bucket

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's default."""


def ddp(graph: TaskGraph, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Schedule:
    """Buckets of gradients averaged while backward goes on; all updates before the next forward."""
    graph = bucket(graph, range(graph.layers)[::-1], bucket_bytes)
    order: list[int] = []
    for step in range(graph.steps):
        order += forward(graph, step) + backward(graph, step) + updates(graph, step)
    order += forward(graph, graph.steps)
    return Schedule(graph, (stream(MAIN, order), *link_lanes(graph)), policy="ddp")
