"""A timeline: what ran where, from when to when. Predicted or measured, it looks the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from gradweave.schedule.tasks import Kind, Task


class Span(NamedTuple):
    """One task on one lane; an interrupted task has several."""

    lane: str
    start: float
    end: float
    task: Task
    number: int


@dataclass(frozen=True)
class Timeline:
    """The tasks that ran on each lane, and the bytes held on each device.

    Attributes:
        spans: By start time.
        lanes: Name and resource of each stream and link, in the order they are drawn.
        memory: For each device the instants at which its bytes in use changed, and the new value. Weights and optimizer
            state are not in it: no order of tasks changes them.
        title: Heading of its picture.
        period: Steps after which the work of a step repeats; ``step_time`` is the mean over them.
        receivers: For each communication task, by index, the devices that wait for it.
    """

    spans: tuple[Span, ...]
    lanes: tuple[tuple[str, str], ...]
    memory: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    title: str = ""
    period: int = 1
    receivers: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def makespan(self) -> float:
        """Seconds until everything is done."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def step_time(self) -> float:
        """Seconds per step in steady state.

        This is the time from the end of one step's first forward (that of its first micro-batch) to the end of the next
        one's, averaged over the last period shown. A single step that nothing follows takes the makespan.
        """
        ends: dict[int, float] = {}
        for span in self.spans:
            if span.task.kind is Kind.F and span.task.microbatch == 0:
                ends[span.task.step] = max(ends.get(span.task.step, 0.0), span.end)
        marks = [ends[step] for step in sorted(ends)]
        if len(marks) > self.period:
            return (marks[-1] - marks[-1 - self.period]) / self.period
        return self.makespan / max(1, len(marks) or len({span.task.step for span in self.spans}))

    @cached_property
    def busy(self) -> dict[str, float]:
        """Share of the makespan in which each lane works."""
        seconds = dict.fromkeys((name for name, _ in self.lanes), 0.0)
        for span in self.spans:
            seconds[span.lane] += span.end - span.start
        return {name: total / self.makespan if self.makespan else 0.0 for name, total in seconds.items()}

    @property
    def idle(self) -> dict[str, float]:
        """Share of the makespan in which each lane does nothing: its bubbles."""
        return {name: 1.0 - share for name, share in self.busy.items()}

    @cached_property
    def exposed_communication(self) -> float:
        """Seconds that a device stands idle while something is being sent to it; the mean over devices."""
        resource_of = dict(self.lanes)
        computing: dict[str, list[tuple[float, float]]] = {}
        receiving: dict[str, list[tuple[float, float]]] = {}
        for span in self.spans:
            if span.task.kind is not Kind.C:
                computing.setdefault(resource_of[span.lane], []).append((span.start, span.end))
            for device in self.receivers.get(span.number, ()):
                receiving.setdefault(device, []).append((span.start, span.end))
        exposed = 0.0
        for device, intervals in receiving.items():
            both = _union_length([*intervals, *computing.get(device, ())])
            exposed += both - _union_length(computing.get(device, ()))
        return exposed / max(1, len(computing))

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at once on any one device."""
        return max((size for points in self.memory.values() for _, size in points), default=0)

    def save(self, path: str | Path, *, planned: Timeline | None = None) -> None:
        """Write a picture (``.png``, ``.svg``, ``.pdf``) or a trace that Perfetto opens (``.json``).

        Args:
            path: Of the file; its suffix says which.
            planned: A prediction of the same work, to be shown on the same axis.
        """
        # Imported here since pictures and traces are made of timelines: they import this file.
        from gradweave.schedule.output import save_beside_plan, save_timelines

        if planned is None:
            save_timelines([self], path)
        else:
            save_beside_plan(self, planned, path)


def _union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
