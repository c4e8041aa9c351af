"""Checks that a schedule can be carried out; errors name the tasks that are wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradweave.errors import ArgumentError, ScheduleError
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.lanes import Discipline, Lane
from gradweave.schedule.timeline import Timeline

_MOST_NAMED = 4


def name_tasks(graph: TaskGraph, indices: Iterable[int]) -> str:
    """Return the labels of the first few tasks and the number of the others."""
    indices = list(indices)
    labels = ", ".join(graph.tasks[i].label for i in indices[:_MOST_NAMED])
    return labels if len(indices) <= _MOST_NAMED else f"{labels} and {len(indices) - _MOST_NAMED} more"


def check_structure(graph: TaskGraph, lanes: Sequence[Lane], waits: Iterable[tuple[int, int]]) -> None:
    """Raise ScheduleError unless each task is listed once, on its own resource, and after what it needs.

    Deadlocks between lanes are left to the simulator, which meets them.
    """
    count = len(graph.tasks)
    lane_of, position = _positions(graph, lanes)
    lost = [task for task, lane_number in enumerate(lane_of) if lane_number < 0]
    if lost:
        raise ScheduleError(f"the schedule loses {name_tasks(graph, lost)}")
    in_order = [lane.discipline is Discipline.IN_ORDER for lane in lanes]
    for task, needs in enumerate(graph.needs):
        lane_number = lane_of[task]
        if not in_order[lane_number]:
            continue
        for need in needs:
            if lane_of[need] == lane_number and position[need] > position[task]:
                raise ScheduleError(
                    f"lane {lanes[lane_number].name!r} breaks a dependency: it lists "
                    f"{graph.tasks[task].label} before {graph.tasks[need].label}, which it needs"
                )
    for task, earlier in waits:
        if not (0 <= task < count and 0 <= earlier < count):
            raise ScheduleError(f"task {task} waits for task {earlier}, but the graph has {count} tasks")


def _positions(graph: TaskGraph, lanes: Sequence[Lane]) -> tuple[list[int], list[int]]:
    """Return each task's lane (-1 if it is in none) and its position there."""
    count = len(graph.tasks)
    lane_of = [-1] * count
    position = [0] * count
    repeated = []
    names: set[str] = set()
    for number, lane in enumerate(lanes):
        if lane.name in names:
            raise ScheduleError(f"two lanes are called {lane.name!r}: give each its own name")
        names.add(lane.name)
        for place, task in enumerate(lane.tasks):
            if not 0 <= task < count:
                raise ScheduleError(f"lane {lane.name!r} lists task {task}, but the graph has {count} tasks")
            if graph.tasks[task].resource != lane.resource:
                raise ScheduleError(
                    f"lane {lane.name!r} of {lane.resource!r} lists {graph.tasks[task].label}, "
                    f"which belongs to {graph.tasks[task].resource!r}"
                )
            if lane_of[task] >= 0:
                repeated.append(task)
            lane_of[task] = number
            position[task] = place
    if repeated:
        raise ScheduleError(f"the schedule repeats {name_tasks(graph, repeated)}")
    return lane_of, position


def check_budget(timeline: Timeline, byte_budget: int) -> None:
    """Raise ScheduleError if any device ever holds more than ``byte_budget`` bytes."""
    if byte_budget <= 0:
        raise ArgumentError("byte_budget", byte_budget, "give a positive number of bytes")
    for device, memory in timeline.memory.items():
        when, peak = max(memory, key=lambda point: point[1], default=(0.0, 0))
        if peak > byte_budget:
            running = [span.task.label for span in timeline.spans if span.start <= when < span.end][:_MOST_NAMED]
            raise ScheduleError(
                f"byte_budget={byte_budget}: {timeline.title} holds {peak} bytes on {device} at {when:.6g} s, "
                f"during {', '.join(running) or 'the last task'}; raise the budget or choose another policy"
            )
