"""Data parallel over an ideal link that sends the first layers first."""

from __future__ import annotations

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.lanes import Discipline, Lane
from gradweave.schedule.policies.ddp import DEFAULT_BUCKET_BYTES
from gradweave.schedule.policies.no_barrier import unbarriered_stream
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.transforms import bucket


def priority(graph: TaskGraph, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Schedule:
    """Like no_barrier, on a link that interrupts a message for one of an earlier layer.

    Collectives cannot be interrupted today; this is the bound that such a link would reach.

    Args:
        graph: A graph of replicas.
        bucket_bytes: As for ddp.
    """
    graph = bucket(graph, bucket_bytes)
    tasks = graph.tasks
    links = (
        Lane(link, link, tuple(sorted(messages, key=lambda i: (tasks[i].step, tasks[i].layer))), Discipline.PREEMPTIVE)
        for link, messages in graph.communication.items()
    )
    return Schedule(graph, (unbarriered_stream(graph), *links), policy="priority")
