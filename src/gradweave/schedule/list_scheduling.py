"""Work-conserving list scheduling: never idle while something can run, most urgent first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.lanes import Discipline, Lane
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.simulator import Choice, running_order
from gradweave.schedule.tasks import Kind


def link_lanes(graph: TaskGraph, discipline: Discipline = Discipline.FIFO) -> tuple[Lane, ...]:
    """Return one lane for each link of the graph, its messages in the order of the graph."""
    return tuple(Lane(link, link, tuple(tasks), discipline) for link, tasks in graph.communication.items())


def greedy(
    graph: TaskGraph,
    urgency: Sequence[Any],
    *,
    waits: tuple[tuple[int, int], ...] = (),
    choose: Choice | None = None,
    policy: str,
) -> Schedule:
    """Return the schedule in which each device always runs its most urgent ready task.

    The order is found by simulating devices that choose for themselves, and then fixed, so that an executor has nothing
    to decide.

    Args:
        graph: A graph whose tasks all have a resource.
        urgency: One sort key per task, most urgent first.
        waits: Further dependencies, as in :class:`~gradweave.schedule.schedule.Schedule`.
        choose: Decides which ready task starts, or that none does, in place of ``urgency``, which orders them for it.
        policy: Name for the schedule.
    """
    by_device: dict[str, list[int]] = {device: [] for device in graph.devices}
    for i, task in enumerate(graph.tasks):
        if task.kind is not Kind.C:
            by_device[task.resource].append(i)
    choosing = [
        Lane(device, device, tuple(sorted(tasks, key=urgency.__getitem__)), Discipline.PRIORITY)
        for device, tasks in by_device.items()
    ]
    links = link_lanes(graph)
    order = running_order(graph, (*choosing, *links), waits, policy, choose)
    lanes = (Lane(lane.name, lane.resource, tuple(ran)) for lane, ran in zip(choosing, order, strict=False))
    return Schedule(graph, (*lanes, *links), waits, policy)
