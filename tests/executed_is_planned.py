"""The law of every executor: what ran is what was planned.

Every task of a schedule ran once, on its lane, in the order of the lane, and after everything that it waits for.
"""

from collections.abc import Iterable
from itertools import pairwise

from gradweave.schedule import Discipline, Lane, Schedule, Timeline

Event = tuple[str, int, float, float]
"""A lane's name, the index of a task in the schedule's graph, and its start and end: seconds or order numbers."""


class NotAsPlannedError(AssertionError):
    """A trace departs from its schedule; the message names the tasks and the lane."""


def check_timeline(schedule: Schedule, timeline: Timeline) -> None:
    """Raise NotAsPlannedError unless a timeline, measured or predicted, is one of the schedule."""
    check_executed(schedule, [(span.lane, span.number, span.start, span.end) for span in timeline.spans])


def check_executed(schedule: Schedule, events: Iterable[Event]) -> None:
    """Raise NotAsPlannedError unless the events are an execution of the schedule.

    A task on a lane that interrupts tasks may have several events.

    Args:
        schedule: The plan.
        events: What ran, in any order. Times of all lanes are those of one clock; a task that starts at the instant
            at which another ends starts after it.
    """
    spans = _spans(schedule, events)
    for lane in schedule.lanes:
        _check_one_at_a_time(schedule, lane, spans)
    _check_dependencies(schedule, spans)
    for lane in schedule.lanes:
        _ORDER[lane.discipline](schedule, lane, spans)


Spans = list[list[tuple[float, float]]]
"""Starts and ends of each task, by index; more than one where the task was interrupted."""


def _spans(schedule: Schedule, events: Iterable[Event]) -> Spans:
    """Return the events by task, after checking that each task ran, on its lane, and as often as the lane allows."""
    tasks = schedule.graph.tasks
    lane_of = {task: lane for lane in schedule.lanes for task in lane.tasks}
    names = [lane.name for lane in schedule.lanes]
    spans: Spans = [[] for _ in tasks]
    for name, task, start, end in events:
        if name not in names:
            raise NotAsPlannedError(f"something ran on lane {name!r}; the schedule has {', '.join(names)}")
        if not 0 <= task < len(tasks):
            raise NotAsPlannedError(f"task {task} ran on lane {name!r}; the graph has {len(tasks)} tasks")
        label, planned = tasks[task].label, lane_of[task]
        if name != planned.name:
            raise NotAsPlannedError(f"{label} ran on lane {name!r}; it was planned on {planned.name!r}")
        if not start <= end:
            raise NotAsPlannedError(f"{label} started at {start} and ended at {end}")
        if spans[task] and planned.discipline is not Discipline.PREEMPTIVE:
            raise NotAsPlannedError(f"{label} ran again, on lane {name!r} at {start}")
        spans[task].append((start, end))
    missing = [tasks[task].label for task, ran in enumerate(spans) if not ran]
    if missing:
        raise NotAsPlannedError(f"{len(missing)} of {len(tasks)} tasks did not run: {', '.join(missing[:4])}")
    return [sorted(ran) for ran in spans]


def _check_one_at_a_time(schedule: Schedule, lane: Lane, spans: Spans) -> None:
    tasks = schedule.graph.tasks
    ran = sorted((start, end, task) for task in lane.tasks for start, end in spans[task])
    for (_, end, before), (start, _, after) in pairwise(ran):
        if start < end:
            raise NotAsPlannedError(
                f"lane {lane.name!r} ran two tasks at once: {tasks[after].label} started at {start}, "
                f"before {tasks[before].label} ended at {end}"
            )


def _check_dependencies(schedule: Schedule, spans: Spans) -> None:
    tasks = schedule.graph.tasks
    needs = [(task, need, "needs") for task, each in enumerate(schedule.graph.needs) for need in each]
    for task, earlier, why in [*needs, *((task, earlier, "waits for") for task, earlier in schedule.waits)]:
        start, end = spans[task][0][0], spans[earlier][-1][1]
        if start < end:
            raise NotAsPlannedError(
                f"{tasks[task].label} started at {start}, before the end at {end} "
                f"of {tasks[earlier].label}, which it {why}"
            )


def _check_as_listed(schedule: Schedule, lane: Lane, spans: Spans) -> None:
    tasks = schedule.graph.tasks
    for before, after in pairwise(lane.tasks):
        # Ends too: a task of no duration shares its instant with its neighbour.
        if spans[after][0] < spans[before][0]:
            raise NotAsPlannedError(
                f"lane {lane.name!r} ran {tasks[after].label} at {spans[after][0][0]}, before {tasks[before].label} "
                f"at {spans[before][0][0]}; it was planned after it"
            )


def _check_by_arrival(schedule: Schedule, lane: Lane, spans: Spans) -> None:
    tasks, arrivals = schedule.graph.tasks, _arrivals(schedule, spans)
    place = {task: number for number, task in enumerate(lane.tasks)}
    ran = sorted(lane.tasks, key=lambda task: (*spans[task][0], arrivals[task], place[task]))
    latest = None
    for task in ran:
        start = spans[task][0][0]
        # Of those that arrive together, one may start at once, before the others have been seen to arrive.
        waited = latest is not None and spans[latest][0][0] > arrivals[latest]
        if latest is not None and (
            arrivals[task] < arrivals[latest]
            or (arrivals[task] == arrivals[latest] and waited and place[task] < place[latest])
        ):
            raise NotAsPlannedError(
                f"lane {lane.name!r} ran {tasks[task].label} at {start}, after {tasks[latest].label}; "
                f"it takes tasks in the order of arrival, and they arrived at {arrivals[task]} and {arrivals[latest]}"
            )
        latest = task


def _check_by_priority(schedule: Schedule, lane: Lane, spans: Spans) -> None:
    tasks, arrivals = schedule.graph.tasks, _arrivals(schedule, spans)
    for place, urgent in enumerate(lane.tasks):
        for other in lane.tasks[place + 1 :]:
            for start, _ in spans[other]:
                if arrivals[urgent] < start < spans[urgent][-1][0]:
                    raise NotAsPlannedError(
                        f"lane {lane.name!r} started {tasks[other].label} at {start}; "
                        f"{tasks[urgent].label} is more urgent and was ready at {arrivals[urgent]}"
                    )


def _arrivals(schedule: Schedule, spans: Spans) -> list[float]:
    """Return the instant at which each task had everything it waits for."""
    earlier: list[list[int]] = [list(needs) for needs in schedule.graph.needs]
    for task, other in schedule.waits:
        earlier[task].append(other)
    # A task that waits for nothing arrives before everything else.
    return [max((spans[other][-1][1] for other in others), default=float("-inf")) for others in earlier]


_ORDER = {
    Discipline.IN_ORDER: _check_as_listed,
    Discipline.FIFO: _check_by_arrival,
    Discipline.PRIORITY: _check_by_priority,
    Discipline.PREEMPTIVE: _check_by_priority,
}
