"""A schedule: which task runs where, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from gradweave.schedule.graph import TaskGraph

if TYPE_CHECKING:
    from gradweave.schedule.timeline import Timeline


class Discipline(Enum):
    """How a lane chooses among its tasks."""

    IN_ORDER = "in order"
    """Strictly as listed, waiting for the next one if need be: a device stream."""
    FIFO = "fifo"
    """In order of arrival, ties as listed: collectives on one communicator."""
    PRIORITY = "priority"
    """The first listed of those that are ready; what has started is finished."""
    PREEMPTIVE = "preemptive"
    """The first listed of those that are ready, interrupting what runs."""


@dataclass(frozen=True, slots=True)
class Lane:
    """The tasks of one stream or link, one at a time.

    Lanes with the same ``resource`` are streams of one device: they run at the same time and
    share it as their tasks' demands allow.
    """

    name: str
    resource: str
    tasks: tuple[int, ...]
    discipline: Discipline = Discipline.IN_ORDER


@dataclass(frozen=True)
class Schedule:
    """What a policy made of a task graph.

    Attributes:
        graph: The graph, as the policy rewrote it (layers placed, messages bucketed).
        lanes: Every task of the graph, once.
        waits: Pairs (task, earlier task) beyond the graph's own dependencies: events that one
            stream waits for on another.
        policy: Name of the policy.
        options: What the policy was told or found out, for reports.
    """

    graph: TaskGraph
    lanes: tuple[Lane, ...]
    waits: tuple[tuple[int, int], ...] = ()
    policy: str = "custom"
    options: dict[str, Any] = field(default_factory=dict)

    def validate(self, *, byte_budget: int | None = None) -> None:
        """Raises :class:`~gradweave.errors.ScheduleError` unless the schedule can be carried out.

        It must run each task exactly once, on its own device or link, after what it depends
        on, without deadlock and, if a ``byte_budget`` is given, within it on every device.
        """
        self.simulate(byte_budget=byte_budget)

    def simulate(self, *, byte_budget: int | None = None) -> Timeline:
        """Predicts the timeline; rejects what :meth:`validate` rejects."""
        from gradweave.schedule.simulator import simulate
        from gradweave.schedule.validation import check_budget, check_structure

        check_structure(self)
        timeline = simulate(self)
        if byte_budget is not None:
            check_budget(self, timeline, byte_budget)
        return timeline
