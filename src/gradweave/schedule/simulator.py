"""Event-driven simulation of a schedule: deterministic, and exact for the model of ``Demand``.

Time moves from one end of a task to the next. At each instant all tasks that end are ended before any lane starts one,
so that bytes freed at an instant are free for the tasks that start then, and a lane chooses among everything that
became ready. Lanes start in the order of the schedule and simultaneous ends are handled in the order of the graph: no
result depends on the order of a set.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from gradweave.errors import ScheduleError
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.lanes import Discipline, Lane
from gradweave.schedule.tasks import Buffer, Task
from gradweave.schedule.timeline import Span, Timeline
from gradweave.schedule.validation import name_tasks

_IDLE = -1
_MOST_CAUSES = 3

Choice = Callable[[str, Sequence[int], Callable[[int], int]], int | None]
"""Return which of a device's ready tasks starts now, or None to wait for the end of another task.

Called with the device, the indices of its ready tasks (in the order of its lane), and a function from a task to the
bytes that would be held if it started: the most of any device on which it takes some.
"""


def simulate(graph: TaskGraph, lanes: Sequence[Lane], waits: Sequence[tuple[int, int]], name: str) -> Timeline:
    """Return the timeline of lanes of sound structure; raise ScheduleError if they deadlock.

    Args:
        graph: The tasks.
        lanes: Every task of the graph, once.
        waits: Pairs (task, earlier task) beyond the graph's own dependencies.
        name: The schedule's name, for the timeline and for errors.
    """
    simulation = _Simulation(graph, lanes, waits, name, graph.buffers)
    simulation.run()
    return simulation.timeline()


def running_order(
    graph: TaskGraph,
    lanes: Sequence[Lane],
    waits: Sequence[tuple[int, int]],
    name: str,
    choose: Choice | None = None,
) -> list[list[int]]:
    """Return the tasks of each lane in the order in which they finish; arguments are those of :func:`simulate`.

    Bytes are accounted for only where ``choose`` decides for the lanes of ``Discipline.PRIORITY``, and asks for them.
    """
    simulation = _Simulation(graph, lanes, waits, name, () if choose is None else graph.buffers, choose)
    simulation.run()
    order: list[list[int]] = [[] for _ in lanes]
    for task, lane, _, _ in simulation.records:
        order[lane].append(task)
    return order


class _LaneState:
    """A lane while it is simulated: its ready tasks, and the one it runs.

    ``ready`` is a heap of (arrival, place, task). Only FIFO lanes tell arrivals apart; elsewhere they are all 0, and
    the place in the lane's list decides alone.
    """

    __slots__ = (
        "busy_since",
        "device",
        "discipline",
        "lane",
        "next_place",
        "number",
        "ready",
        "running",
        "running_place",
    )

    def __init__(self, number: int, lane: Lane) -> None:
        self.number = number
        self.lane = lane
        self.discipline = lane.discipline
        self.ready: list[tuple[float, int, int]] = []
        self.next_place = 0
        self.running = _IDLE
        self.running_place = 0
        self.busy_since = 0.0
        self.device: _SharedDevice | None = None

    def can_start(self) -> bool:
        """Return whether a task should start now, in place of the running one if there is one."""
        if not self.ready:
            return False
        if self.running != _IDLE:
            return self.discipline is Discipline.PREEMPTIVE and self.ready[0][1] < self.running_place
        return self.discipline is not Discipline.IN_ORDER or self.ready[0][1] == self.next_place


class _SharedDevice:
    """A device with several streams, whose running tasks slow each other down beyond its capacity.

    All running tasks proceed at one ``rate``, which holds until the set of them changes. Only then are their remaining
    seconds brought up to date, so a task that runs undisturbed ends after exactly its own seconds.
    """

    __slots__ = ("rate", "running", "settled")

    def __init__(self) -> None:
        self.running: dict[int, Task] = {}
        self.settled = 0.0
        self.rate = 1.0

    def settle(self, now: float, remaining: list[float]) -> None:
        """Bring the running tasks' remaining seconds up to date."""
        done = (now - self.settled) * self.rate
        if done:
            for task in self.running:
                # Rounding may overshoot by a last bit; a task must not end before now.
                remaining[task] = max(0.0, remaining[task] - done)
        self.settled = now

    def set_rate(self) -> None:
        """Set the speed at which each running task proceeds from now on."""
        compute = sum(task.demand.compute for task in self.running.values())
        memory = sum(task.demand.memory for task in self.running.values())
        self.rate = 1.0 / max(1.0, compute, memory)


class _Simulation:
    """State of a simulation; lists are indexed by task.

    Attributes:
        now: The current instant.
        waiting: Number of dependencies and waits that are not finished.
        remaining: Seconds left at full speed, as of the task's last start or its device's last change.
        version: Counts what makes earlier events of the task void: it was retimed, interrupted or finished. The heap of
            events cannot drop entries, so void ones stay in it and are skipped.
        events: Heap of (end, task, version).
        records: (task, lane, start, end) of everything that ran, by end.
        refused: Lanes for which ``choose`` preferred to wait.
    """

    def __init__(
        self,
        graph: TaskGraph,
        lanes: Sequence[Lane],
        waits: Iterable[tuple[int, int]],
        name: str,
        buffers: tuple[Buffer, ...],
        choose: Choice | None = None,
    ) -> None:
        self.graph = graph
        self.choose = choose
        self.refused: set[int] = set()
        self.waits = waits
        self.name = name
        self.buffers = buffers
        count = len(graph.tasks)
        self.now = 0.0
        self.finished = 0
        self.waiting = [len(needs) for needs in graph.needs]
        self.successors = graph.successors
        self.released_by: dict[int, list[int]] = {}
        for task, earlier in waits:
            self.released_by.setdefault(earlier, []).append(task)
            self.waiting[task] += 1
        self.remaining = [task.seconds for task in graph.tasks]
        self.started = [False] * count
        self.version = [0] * count
        self.events: list[tuple[float, int, int]] = []
        self.records: list[tuple[int, int, float, float]] = []
        self._make_lanes(lanes)
        self._make_buffers()

    def _make_lanes(self, lanes: Sequence[Lane]) -> None:
        count = len(self.graph.tasks)
        self.lanes = [_LaneState(number, lane) for number, lane in enumerate(lanes)]
        self.lane_of: list[_LaneState] = [None] * count  # type: ignore[list-item]
        self.place = [0] * count
        streams: dict[str, list[_LaneState]] = {}
        # Where messages cost the device work of its own, the link competes for the device like one more stream.
        burdened = self.graph.devices[0] if self.graph.burdens_its_device else None
        for state in self.lanes:
            streams.setdefault(burdened or state.lane.resource, []).append(state)
            for place, task in enumerate(state.lane.tasks):
                self.lane_of[task] = state
                self.place[task] = place
        for sharing in streams.values():
            if len(sharing) > 1:
                device = _SharedDevice()
                for state in sharing:
                    state.device = device

    def _make_buffers(self) -> None:
        self.buffer_users = [len(buffer.users) for buffer in self.buffers]
        self.buffer_live = [False] * len(self.buffers)
        self.buffers_of: dict[int, list[int]] = {}
        for number, buffer in enumerate(self.buffers):
            for task in buffer.users:
                self.buffers_of.setdefault(task, []).append(number)
        self.held = dict.fromkeys((buffer.device for buffer in self.buffers), 0)
        self.memory: dict[str, list[tuple[float, int]]] = {device: [(0.0, 0)] for device in self.held}

    def run(self) -> None:
        """Run until no event is left; raise ScheduleError if tasks are left then."""
        touched = set()  # lanes whose ready tasks, or whose running one, changed at this instant
        for task, waiting in enumerate(self.waiting):
            if not waiting:
                touched.add(self._arrive(task))
        changed: set[_SharedDevice] = set()
        events = self.events
        while True:
            for number in sorted(touched):
                state = self.lanes[number]
                if self._is_chosen_for(state) if self._has_choice(state) else state.can_start():
                    self._start(state, changed)
            # Once for all ends and starts of the instant: the rates in between would last no time.
            for device in changed:
                self._retime(device)
            changed.clear()
            if not events:
                break
            # A lane that waited may start after any end: bytes are freed on other devices too.
            touched, self.refused = self.refused, set()
            self.now = now = events[0][0]
            # Exactly equal times are one instant. A task of no duration ends in the next round of the same instant,
            # since it starts after these ends.
            while events and events[0][0] == now:
                _, task, version = heapq.heappop(events)
                if version == self.version[task]:
                    self._finish(task, touched, changed)
        if self.finished < len(self.graph.tasks):
            self._raise_deadlock()

    def _arrive(self, task: int) -> int:
        """Add a task to the ready ones of its lane; return the lane's number."""
        state = self.lane_of[task]
        arrival = self.now if state.discipline is Discipline.FIFO else 0.0
        heapq.heappush(state.ready, (arrival, self.place[task], task))
        return state.number

    def _has_choice(self, state: _LaneState) -> bool:
        return self.choose is not None and state.discipline is Discipline.PRIORITY

    def _is_chosen_for(self, state: _LaneState) -> bool:
        """Put the task that is chosen at the head of an idle lane; return whether there is one."""
        if state.running != _IDLE or not state.ready or self.choose is None:
            return False
        state.ready.sort()
        tasks = [task for _, _, task in state.ready]
        chosen = self.choose(state.lane.resource, tasks, self._bytes_once_started)
        if chosen is None:
            self.refused.add(state.number)
            return False
        # heappop takes the head, whatever it is, and the rest is sorted, which makes it a heap.
        state.ready.insert(0, state.ready.pop(tasks.index(chosen)))
        return True

    def _bytes_once_started(self, task: int) -> int:
        taken: dict[str, int] = {}
        for number in self.buffers_of.get(task, ()):
            if not self.buffer_live[number]:
                buffer = self.buffers[number]
                taken[buffer.device] = taken.get(buffer.device, 0) + buffer.size
        return max((self.held[device] + size for device, size in taken.items()), default=0)

    def _start(self, state: _LaneState, changed: set[_SharedDevice]) -> None:
        """Start the most urgent ready task of a lane, interrupting the running one if there is one."""
        if state.running != _IDLE:
            self._interrupt(state)
        _, place, task = heapq.heappop(state.ready)
        state.running = task
        state.running_place = place
        state.next_place = place + 1
        state.busy_since = self.now
        if not self.started[task]:
            self.started[task] = True
            if task in self.buffers_of:
                self._take(task)
        if state.device is None:
            heapq.heappush(self.events, (self.now + self.remaining[task], task, self.version[task]))
        else:
            state.device.settle(self.now, self.remaining)
            state.device.running[task] = self.graph.tasks[task]
            changed.add(state.device)

    def _interrupt(self, state: _LaneState) -> None:
        """Put the running task of a preemptive lane back, with what is left of it."""
        task = state.running
        if state.device is not None:
            state.device.settle(self.now, self.remaining)
            del state.device.running[task]
        else:
            self.remaining[task] -= self.now - state.busy_since
        self.version[task] += 1
        if self.now > state.busy_since:
            self.records.append((task, state.number, state.busy_since, self.now))
        heapq.heappush(state.ready, (0.0, state.running_place, task))

    def _retime(self, device: _SharedDevice) -> None:
        """Give all running tasks of a device new ends, since the set of them changed."""
        device.set_rate()
        for task in device.running:
            self.version[task] += 1
            heapq.heappush(self.events, (self.now + self.remaining[task] / device.rate, task, self.version[task]))

    def _finish(self, task: int, touched: set[int], changed: set[_SharedDevice]) -> None:
        """End a task: free its lane and its bytes, and let the tasks arrive that waited for it alone."""
        state = self.lane_of[task]
        state.running = _IDLE
        touched.add(state.number)
        self.finished += 1
        self.version[task] += 1
        self.records.append((task, state.number, state.busy_since, self.now))
        if state.device is not None:
            state.device.settle(self.now, self.remaining)
            del state.device.running[task]
            changed.add(state.device)
        if task in self.buffers_of:
            self._release(task)
        waiting = self.waiting
        for successor in chain(self.successors[task], self.released_by.get(task, ())):
            waiting[successor] -= 1
            if not waiting[successor]:
                touched.add(self._arrive(successor))

    def _take(self, task: int) -> None:
        """Allocate the buffers of which a task is the first user."""
        for number in self.buffers_of[task]:
            if not self.buffer_live[number]:
                self.buffer_live[number] = True
                self._hold(number, +1)

    def _release(self, task: int) -> None:
        """Free the buffers of which a task is the last user to finish."""
        for number in self.buffers_of[task]:
            self.buffer_users[number] -= 1
            if not self.buffer_users[number]:
                self._hold(number, -1)

    def _hold(self, number: int, sign: int) -> None:
        """Add a buffer to the bytes that its device holds, or take it away."""
        buffer = self.buffers[number]
        if buffer.size:
            self.held[buffer.device] += sign * buffer.size
            self.memory[buffer.device].append((self.now, self.held[buffer.device]))

    def _raise_deadlock(self) -> None:
        """Name the task at which each lane is stuck, and the tasks that it waits for."""
        stuck = []
        for state in self.lanes:
            left = [task for task in state.lane.tasks if not self.started[task]]
            if left:
                stuck.append((state.lane.name, left[0]))
        waits: dict[int, list[int]] = {}
        for task, earlier in self.waits:
            waits.setdefault(task, []).append(earlier)
        causes = []
        for lane, task in stuck[:_MOST_CAUSES]:
            needed = (*self.graph.needs[task], *waits.get(task, ()))
            awaited = name_tasks(self.graph, [need for need in needed if not self.started[need]])
            label = self.graph.tasks[task].label
            causes.append(f"{lane} is stuck at {label}, which waits for {awaited or 'its lane'}")
        raise ScheduleError(f"{self.name} deadlocks at {self.now:.6g} s: {'; '.join(causes)}")

    def timeline(self) -> Timeline:
        """Return what ran."""
        tasks = self.graph.tasks
        names = [state.lane.name for state in self.lanes]
        spans = tuple(
            Span(names[lane], start, end, tasks[task], task)
            for task, lane, start, end in sorted(self.records, key=lambda record: (record[2], record[1], record[3]))
        )
        return Timeline(
            spans=spans,
            lanes=tuple((state.lane.name, state.lane.resource) for state in self.lanes),
            memory={device: tuple(points) for device, points in self.memory.items()},
            title=self.name,
            period=self.graph.period,
            receivers=_receivers(self.graph),
        )


def _receivers(graph: TaskGraph) -> dict[int, tuple[str, ...]]:
    """Return, for each communication task, the devices that wait for what it carries."""
    communication = {task for tasks in graph.communication.values() for task in tasks}
    receivers: dict[int, set[str]] = {task: set() for task in communication}
    if communication:
        for task, needs in enumerate(graph.needs):
            for need in needs:
                if need in communication and task not in communication:
                    receivers[need].add(graph.tasks[task].resource)
    return {task: tuple(sorted(devices)) for task, devices in receivers.items()}
