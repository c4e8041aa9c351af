"""The task graph: what must run, what it waits for, and which bytes stay alive meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from gradweave.errors import ArgumentError, ScheduleError
from gradweave.schedule.costs import Costs
from gradweave.schedule.links import Cluster
from gradweave.schedule.tasks import Buffer, Kind, Task

_LONGEST = 1e15
"""Seconds; beyond it, sums of durations lose their seconds to rounding."""


class Family(StrEnum):
    """The kinds of scenario; each policy fits some of them."""

    SINGLE = "single"
    DATA_PARALLEL = "data-parallel"
    PIPELINE = "pipeline"
    HIERARCHICAL = "daso"


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in a topological order, with their dependencies and buffers.

    Tasks are referred to by their index. ``needs[i]`` lists the tasks that task ``i`` waits for, all of them before
    ``i``: a graph is acyclic by construction.

    Attributes:
        family: The scenario it was built for.
        tasks: All tasks.
        needs: For each task, the indices of the tasks it depends on.
        buffers: The bytes that live across tasks.
        costs: The network it was built from.
        cluster: Devices and links.
        steps: Number of complete training steps.
        microbatches: Micro-batches per step.
        next_forward: Whether the forward of one more step follows.
        period: Steps after which the work of a step repeats (above 1 where some work is not done in every step).
    """

    family: Family
    tasks: tuple[Task, ...]
    needs: tuple[tuple[int, ...], ...]
    buffers: tuple[Buffer, ...]
    costs: Costs
    cluster: Cluster = Cluster()
    steps: int = 1
    microbatches: int = 1
    next_forward: bool = False
    period: int = 1

    def __post_init__(self) -> None:
        if len(self.needs) != len(self.tasks):
            raise ArgumentError("needs", len(self.needs), f"give one entry for each of the {len(self.tasks)} tasks")
        for task in self.tasks:
            if not 0 <= task.seconds < _LONGEST:
                raise ArgumentError(
                    f"seconds of {task.label}", task.seconds, f"give 0 or more, and less than {_LONGEST:g}"
                )
        for buffer in self.buffers:
            if buffer.size < 0 or not buffer.users or not all(0 <= user < len(self.tasks) for user in buffer.users):
                raise ArgumentError("buffers", buffer, "give a size of 0 or more, and tasks of the graph as users")
        for index, needs in enumerate(self.needs):
            for need in needs:
                if not 0 <= need < index:
                    raise ScheduleError(
                        f"{self.tasks[index].label} depends on task {need}, which is not before it: "
                        "list tasks in a topological order"
                    )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.costs.layers)

    @property
    def forwards(self) -> int:
        """Number of steps that have a forward."""
        return self.steps + self.next_forward

    @cached_property
    def index(self) -> dict[tuple[Kind, int, int, int], int]:
        """Task index by (kind, layer, micro-batch, step), without communication and tasks that have a note."""
        return {
            (task.kind, task.layer, task.microbatch, task.step): i
            for i, task in enumerate(self.tasks)
            if task.kind is not Kind.C and not task.note
        }

    def find(self, kind: Kind, layers: Iterable[int], step: int, microbatch: int = 0) -> list[int]:
        """Return the indices of the tasks of one kind, micro-batch and step, in the order of ``layers``."""
        index = self.index
        return [index[kind, layer, microbatch, step] for layer in layers]

    @cached_property
    def successors(self) -> tuple[list[int], ...]:
        """For each task, the tasks that depend on it."""
        successors: tuple[list[int], ...] = tuple([] for _ in self.tasks)
        for task, needs in enumerate(self.needs):
            for need in needs:
                successors[need].append(task)
        return successors

    @cached_property
    def communication(self) -> dict[str, list[int]]:
        """Indices of the communication tasks of each link."""
        by_link: dict[str, list[int]] = {}
        for i, task in enumerate(self.tasks):
            if task.kind is Kind.C:
                by_link.setdefault(task.resource, []).append(i)
        return by_link

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that compute, in order of first use."""
        return tuple(dict.fromkeys(task.resource for task in self.tasks if task.kind is not Kind.C))

    @property
    def burdens_its_device(self) -> bool:
        """Whether communication takes a share of the one device that stands for all."""
        return self.family is Family.DATA_PARALLEL and self.cluster.link.device_seconds > 0

    @cached_property
    def critical_path(self) -> float:
        """Seconds along the longest chain of dependencies, a lower bound for every schedule."""
        ends = [0.0] * len(self.tasks)
        for i, (task, needs) in enumerate(zip(self.tasks, self.needs, strict=True)):
            ends[i] = max((ends[need] for need in needs), default=0.0) + task.seconds
        return max(ends, default=0.0)

    @cached_property
    def serial_seconds(self) -> float:
        """Seconds of all tasks one after the other, an upper bound for every sound schedule."""
        return sum(task.seconds for task in self.tasks)
