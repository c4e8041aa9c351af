"""Plain data parallel, as in DistributedDataParallel."""

from __future__ import annotations

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.list_scheduling import link_lanes
from gradweave.schedule.policies.one_device import MAIN, backward, forward, stream, updates
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.transforms import bucket

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's default."""


def ddp(graph: TaskGraph, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Schedule:
    """Average buckets of gradients during backward; all updates come before the next forward.

    Args:
        graph: A graph of replicas.
        bucket_bytes: Bytes at which a bucket is closed; 0 for one message per layer.
    """
    graph = bucket(graph, bucket_bytes)
    order: list[int] = []
    for step in range(graph.steps):
        order += forward(graph, step) + backward(graph, step) + updates(graph, step)
    order += forward(graph, graph.steps)
    return Schedule(graph, (stream(MAIN, order), *link_lanes(graph)), policy="ddp")
