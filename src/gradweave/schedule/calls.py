"""The part of a schedule that one call of a training step runs.

A schedule is planned over several steps; a program takes one step per call. In the steady state a call runs the tasks
of its own step and those that the step before has left behind, such as updates beside the next forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from gradweave.errors import ScheduleError
from gradweave.schedule.lanes import Discipline
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Kind, Task


class Slot(NamedTuple):
    """The place of a task in a call.

    Attributes:
        task: The task, of the last complete step of the schedule's graph.
        lane: Index of its lane in the schedule.
        carried: Whether it is run for the step before.
    """

    task: Task
    lane: int
    carried: bool


@dataclass(frozen=True)
class StepCall:
    """What one call of a step runs.

    Attributes:
        schedule: The schedule.
        slots: The tasks in the order in which they are issued.
        waits: Pairs (slot, earlier slot): what a task needs by the graph, and what it waits for by the schedule. What
            it needs of earlier calls is not among them, since a call ends when all of its lanes have.
    """

    schedule: Schedule
    slots: tuple[Slot, ...]
    waits: tuple[tuple[int, int], ...]

    @property
    def carries(self) -> bool:
        """Whether a call leaves tasks to the next one."""
        return any(slot.carried for slot in self.slots)


def step_call(schedule: Schedule) -> StepCall:
    """Return what one call runs of a schedule for one device.

    A call ends where the next step begins, in the order in which tasks start by simulation.
    """
    graph = schedule.graph
    order = issue_order(schedule)
    first: dict[int, int] = {}
    for position, task in enumerate(order):
        first.setdefault(graph.tasks[task].step, position)
    last = graph.steps - 1
    end = first.get(graph.steps, len(order))
    own = [task for task in order[first[last] : end] if graph.tasks[task].step == last]
    after = order[end:]
    strays = [task for task in after if graph.tasks[task].step < last]
    if strays:
        raise ScheduleError(f"{graph.tasks[strays[0]].label} runs two steps late; a call runs tasks of two steps only")
    if after:
        forwards = graph.index
        tail = [
            (forwards[Kind.F, task.layer, task.microbatch, last], False) if task.step > last else (index, True)
            for index in after
            for task in (graph.tasks[index],)
        ]
        own = [task for task in own if graph.tasks[task].kind is not Kind.F]
        # Updates on the border go with those that cross it: nothing but the next forward waits for them.
        while any(carried for _, carried in tail) and graph.tasks[own[-1]].kind is Kind.U:
            tail.insert(0, (own.pop(), True))
    else:
        tail = []
    placed = [*tail, *((task, False) for task in own)]
    lane_of = {task: number for number, lane in enumerate(schedule.lanes) for task in lane.tasks}
    slots = tuple(Slot(graph.tasks[task], lane_of[task], carried) for task, carried in placed)
    return StepCall(schedule, slots, tuple(sorted(set(_waits(schedule, placed)))))


def issue_order(schedule: Schedule) -> list[int]:
    """Return all tasks in the order in which they start by simulation, and each after all that it waits for.

    A message is issued when it arrives at its link, which sends it when those before it are sent.
    """
    graph = schedule.graph
    spans = schedule.simulate().spans
    starts, ends = [0.0] * len(graph.tasks), [0.0] * len(graph.tasks)
    for span in reversed(spans):
        starts[span.number] = span.start
    for span in spans:
        ends[span.number] = max(ends[span.number], span.end)
    for lane in schedule.lanes:
        if lane.discipline is Discipline.FIFO:
            for task in lane.tasks:
                starts[task] = max((ends[need] for need in graph.needs[task]), default=starts[task])
    earlier: list[list[int]] = [list(needs) for needs in graph.needs]
    for task, other in schedule.waits:
        earlier[task].append(other)
    for lane in schedule.lanes:
        if lane.discipline is Discipline.IN_ORDER:
            for before, after in pairwise(lane.tasks):
                earlier[after].append(before)
    place = {
        task: (graph.tasks[task].kind is not Kind.C, number, at)  # what arrives with the border is sent before it
        for number, lane in enumerate(schedule.lanes)
        for at, task in enumerate(lane.tasks)
    }
    return _in_order(earlier, [(starts[task], *place[task]) for task in range(len(starts))])


def _in_order(earlier: Sequence[Sequence[int]], keys: Sequence[tuple[float, bool, int, int]]) -> list[int]:
    """Return all numbers so that each comes after those before it, and otherwise by key."""
    left = [len(set(others)) for others in earlier]
    later: list[list[int]] = [[] for _ in earlier]
    for number, others in enumerate(earlier):
        for other in set(others):
            later[other].append(number)
    ready = [(keys[number], number) for number, count in enumerate(left) if count == 0]
    heapify(ready)
    order = []
    while ready:
        _, number = heappop(ready)
        order.append(number)
        for after in later[number]:
            left[after] -= 1
            if left[after] == 0:
                heappush(ready, (keys[after], after))
    return order


def _waits(schedule: Schedule, placed: Sequence[tuple[int, bool]]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of slots of which one waits for the other, each by what it waits for in any step."""
    graph = schedule.graph
    slot_of: dict[tuple[Kind, int, int, str], tuple[int, bool]] = {}
    for position, (index, carried) in enumerate(placed):
        slot_of[_key(graph.tasks[index])] = position, carried
    pairs = [(task, need) for task, needs in enumerate(graph.needs) for need in needs]
    for task, need in (*pairs, *schedule.waits):
        one, other = graph.tasks[task], graph.tasks[need]
        (slot, carried), (earlier, was_carried) = slot_of[_key(one)], slot_of[_key(other)]
        if one.step - other.step == carried_by(was_carried) - carried_by(carried):
            yield slot, earlier


def carried_by(carried: bool) -> int:
    """Return the number of calls by which a task runs later than its step."""
    return 1 if carried else 0


def _key(task: Task) -> tuple[Kind, int, int, str]:
    return task.kind, task.layer, task.microbatch, task.note
