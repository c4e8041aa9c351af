"""A schedule: which task runs where, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.lanes import Lane
from gradweave.schedule.simulator import simulate
from gradweave.schedule.timeline import Timeline
from gradweave.schedule.validation import check_budget, check_structure


@dataclass(frozen=True)
class Schedule:
    """The order that a policy gives to a task graph.

    Attributes:
        graph: The graph, as the policy rewrote it (layers placed, messages bucketed).
        lanes: Every task of the graph, once.
        waits: Pairs (task, earlier task) beyond the graph's own dependencies: events of one stream that another waits
            for.
        policy: Name of the policy.
        options: Options of the policy, as given or as found by search, for reports.
    """

    graph: TaskGraph
    lanes: tuple[Lane, ...]
    waits: tuple[tuple[int, int], ...] = ()
    policy: str = "custom"
    options: dict[str, Any] = field(default_factory=dict)

    def validate(self, *, byte_budget: int | None = None) -> None:
        """Raise :class:`~gradweave.errors.ScheduleError` unless the schedule can be carried out.

        It must run each task exactly once, on its own device or link, after what it depends on and without deadlock.

        Args:
            byte_budget: Most bytes that any device may hold at once (default: no bound).
        """
        self.simulate(byte_budget=byte_budget)

    def simulate(self, *, byte_budget: int | None = None) -> Timeline:
        """Return the predicted timeline; raise what :meth:`validate` raises."""
        check_structure(self.graph, self.lanes, self.waits)
        timeline = simulate(self.graph, self.lanes, self.waits, self.policy)
        if byte_budget is not None:
            check_budget(timeline, byte_budget)
        return timeline
