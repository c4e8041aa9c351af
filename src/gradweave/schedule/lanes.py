"""Lanes: the streams and links that tasks run on, and how each chooses its next task."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Discipline(Enum):
    """How a lane chooses among its tasks."""

    IN_ORDER = "in order"
    """Strictly as listed, waiting for the next one if need be: a device stream."""
    FIFO = "fifo"
    """In order of arrival, ties as listed: collectives on one communicator."""
    PRIORITY = "priority"
    """The first listed of those that are ready; a task that has started is finished."""
    PREEMPTIVE = "preemptive"
    """The first listed of those that are ready, interrupting the one that runs."""


@dataclass(frozen=True, slots=True)
class Lane:
    """The tasks of one stream or link, one at a time.

    Lanes with the same ``resource`` are streams of one device: they run at the same time and share it as their tasks'
    demands allow.

    Attributes:
        name: Unique within a schedule.
        resource: The device or link that every task of the lane belongs to.
        tasks: Indices of the tasks, in an order that ``discipline`` gives a meaning to.
        discipline: How the next task is chosen.
    """

    name: str
    resource: str
    tasks: tuple[int, ...]
    discipline: Discipline = Discipline.IN_ORDER
