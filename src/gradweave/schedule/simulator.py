"""Event-driven simulation of a schedule: deterministic, and exact for the model of `Demand`.

Time moves from one task's end to the next. At each instant all tasks that end are ended, then
each lane starts what its discipline allows. Bytes are freed by ends before they are taken by
starts.
"""

from __future__ import annotations

import heapq
from itertools import chain

from gradweave.errors import ScheduleError
from gradweave.schedule.schedule import Discipline, Lane, Schedule
from gradweave.schedule.tasks import Buffer, Task
from gradweave.schedule.timeline import Span, Timeline
from gradweave.schedule.validation import name_tasks

_IDLE = -1


def simulate(schedule: Schedule) -> Timeline:
    """Runs a schedule whose structure is sound; raises if it deadlocks."""
    simulation = _Simulation(schedule, schedule.graph.buffers)
    simulation.run()
    return simulation.timeline()


def running_order(schedule: Schedule) -> list[list[int]]:
    """The tasks of each lane in the order in which they finish; bytes are not accounted for."""
    simulation = _Simulation(schedule, ())
    simulation.run()
    order: list[list[int]] = [[] for _ in schedule.lanes]
    for task, lane, _, _ in simulation.records:
        order[lane].append(task)
    return order


class _Queue:
    """A lane while it is simulated: its ready tasks, and the one it runs."""

    __slots__ = (
        "busy_since",
        "device",
        "discipline",
        "lane",
        "name",
        "next_place",
        "ready",
        "running",
        "running_place",
    )

    def __init__(self, number: int, lane: Lane) -> None:
        self.name = number
        self.lane = lane
        self.discipline = lane.discipline
        self.ready: list[tuple[float, int, int]] = []
        self.next_place = 0
        self.running = _IDLE
        self.running_place = 0
        self.busy_since = 0.0
        self.device: _SharedDevice | None = None

    def startable(self) -> bool:
        """Whether a task should start now, in place of the running one if there is one."""
        if not self.ready:
            return False
        if self.running != _IDLE:
            return self.discipline is Discipline.PREEMPTIVE and self.ready[0][1] < self.running_place
        return self.discipline is not Discipline.IN_ORDER or self.ready[0][1] == self.next_place


class _SharedDevice:
    """A device with several streams: its running tasks slow each other down beyond its capacity."""

    __slots__ = ("rate", "running", "settled")

    def __init__(self) -> None:
        self.running: dict[int, Task] = {}
        self.settled = 0.0
        self.rate = 1.0

    def settle(self, now: float, remaining: list[float]) -> None:
        """Brings the running tasks' remaining seconds up to date."""
        done = (now - self.settled) * self.rate
        if done:
            for task in self.running:
                remaining[task] = max(0.0, remaining[task] - done)
        self.settled = now

    def set_rate(self) -> None:
        """Speed at which each running task now proceeds."""
        compute = sum(task.demand.compute for task in self.running.values())
        memory = sum(task.demand.memory for task in self.running.values())
        self.rate = 1.0 / max(1.0, compute, memory)


class _Simulation:
    def __init__(self, schedule: Schedule, buffers: tuple[Buffer, ...]) -> None:
        self.schedule = schedule
        self.graph = graph = schedule.graph
        self.buffers = buffers
        count = len(graph.tasks)
        self.now = 0.0
        self.finished = 0
        self.waiting = [len(needs) for needs in graph.needs]
        self.successors = graph.successors
        self.released_by: dict[int, list[int]] = {}
        for task, earlier in schedule.waits:
            self.released_by.setdefault(earlier, []).append(task)
            self.waiting[task] += 1
        self.remaining = [task.seconds for task in graph.tasks]
        self.started = [False] * count
        self.version = [0] * count
        self.events: list[tuple[float, int, int]] = []
        self.records: list[tuple[int, int, float, float]] = []
        self._make_queues()
        self._make_buffers()

    def _make_queues(self) -> None:
        count = len(self.graph.tasks)
        self.queues = [_Queue(number, lane) for number, lane in enumerate(self.schedule.lanes)]
        self.queue_of: list[_Queue] = [None] * count  # type: ignore[list-item]
        self.place = [0] * count
        streams: dict[str, list[_Queue]] = {}
        burdened = self.graph.devices[0] if self.graph.burdens_its_device else None
        for queue in self.queues:
            streams.setdefault(burdened or queue.lane.resource, []).append(queue)
            for place, task in enumerate(queue.lane.tasks):
                self.queue_of[task] = queue
                self.place[task] = place
        for sharing in streams.values():
            if len(sharing) > 1:
                device = _SharedDevice()
                for queue in sharing:
                    queue.device = device

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
        touched = set()
        for task, waiting in enumerate(self.waiting):
            if not waiting:
                touched.add(self._arrive(task))
        retimed: set[_SharedDevice] = set()
        events = self.events
        while True:
            for number in sorted(touched):
                queue = self.queues[number]
                while queue.startable():
                    self._start(queue, retimed)
            for device in retimed:
                self._retime(device)
            retimed.clear()
            if not events:
                break
            touched = set()
            self.now = now = events[0][0]
            while events and events[0][0] == now:
                _, task, version = heapq.heappop(events)
                if version == self.version[task]:
                    self._finish(task, touched, retimed)
        if self.finished < len(self.graph.tasks):
            self._raise_deadlock()

    def _arrive(self, task: int) -> int:
        """A task became ready; returns the number of its lane."""
        queue = self.queue_of[task]
        arrival = self.now if queue.discipline is Discipline.FIFO else 0.0
        heapq.heappush(queue.ready, (arrival, self.place[task], task))
        return queue.name

    def _start(self, queue: _Queue, retimed: set[_SharedDevice]) -> None:
        if queue.running != _IDLE:
            self._interrupt(queue)
        _, place, task = heapq.heappop(queue.ready)
        queue.running = task
        queue.running_place = place
        queue.next_place = place + 1
        queue.busy_since = self.now
        if not self.started[task]:
            self.started[task] = True
            if task in self.buffers_of:
                self._take(task)
        if queue.device is None:
            heapq.heappush(self.events, (self.now + self.remaining[task], task, self.version[task]))
        else:
            queue.device.settle(self.now, self.remaining)
            queue.device.running[task] = self.graph.tasks[task]
            retimed.add(queue.device)

    def _interrupt(self, queue: _Queue) -> None:
        """Puts the running task of a preemptive lane back, with what is left of it."""
        task = queue.running
        if queue.device is not None:
            queue.device.settle(self.now, self.remaining)
            del queue.device.running[task]
        else:
            self.remaining[task] -= self.now - queue.busy_since
        self.version[task] += 1
        if self.now > queue.busy_since:
            self.records.append((task, queue.name, queue.busy_since, self.now))
        heapq.heappush(queue.ready, (0.0, queue.running_place, task))

    def _retime(self, device: _SharedDevice) -> None:
        """The set of running tasks changed: all of them end at another time now."""
        device.set_rate()
        for task in device.running:
            self.version[task] += 1
            heapq.heappush(self.events, (self.now + self.remaining[task] / device.rate, task, self.version[task]))

    def _finish(self, task: int, touched: set[int], retimed: set[_SharedDevice]) -> None:
        queue = self.queue_of[task]
        queue.running = _IDLE
        touched.add(queue.name)
        self.finished += 1
        self.version[task] += 1
        self.records.append((task, queue.name, queue.busy_since, self.now))
        if queue.device is not None:
            queue.device.settle(self.now, self.remaining)
            del queue.device.running[task]
            retimed.add(queue.device)
        if task in self.buffers_of:
            self._release(task)
        waiting = self.waiting
        for successor in chain(self.successors[task], self.released_by.get(task, ())):
            waiting[successor] -= 1
            if not waiting[successor]:
                touched.add(self._arrive(successor))

    def _take(self, task: int) -> None:
        for number in self.buffers_of[task]:
            if not self.buffer_live[number]:
                self.buffer_live[number] = True
                self._hold(number, +1)

    def _release(self, task: int) -> None:
        for number in self.buffers_of[task]:
            self.buffer_users[number] -= 1
            if not self.buffer_users[number]:
                self._hold(number, -1)

    def _hold(self, number: int, sign: int) -> None:
        buffer = self.buffers[number]
        if buffer.size:
            self.held[buffer.device] += sign * buffer.size
            self.memory[buffer.device].append((self.now, self.held[buffer.device]))

    def _raise_deadlock(self) -> None:
        """Names the tasks at the head of each lane that cannot start, and what they wait for."""
        stuck = []
        for queue in self.queues:
            left = [task for task in queue.lane.tasks if not self.started[task]]
            if left:
                stuck.append((queue.lane.name, left[0]))
        waits: dict[int, list[int]] = {}
        for task, earlier in self.schedule.waits:
            waits.setdefault(task, []).append(earlier)
        causes = []
        for lane, task in stuck[:3]:
            blocked_by = [n for n in (*self.graph.needs[task], *waits.get(task, ())) if not self.started[n]]
            causes.append(f"{lane} is stuck at {name_tasks(self.graph, [task])}, which waits for "
                          f"{name_tasks(self.graph, blocked_by) or 'its lane'}")  # fmt: skip
        raise ScheduleError(f"{self.schedule.policy} deadlocks at {self.now:.6g} s: {'; '.join(causes)}")

    def timeline(self) -> Timeline:
        tasks = self.graph.tasks
        names = [lane.name for lane in self.schedule.lanes]
        spans = tuple(
            Span(names[lane], start, end, tasks[task], task)
            for task, lane, start, end in sorted(self.records, key=lambda record: (record[2], record[1], record[3]))
        )
        return Timeline(
            spans=spans,
            lanes=tuple((lane.name, lane.resource) for lane in self.schedule.lanes),
            memory={device: tuple(points) for device, points in self.memory.items()},
            title=self.schedule.policy,
            period=self.graph.period,
            receivers=_receivers(self.schedule),
        )


def _receivers(schedule: Schedule) -> dict[int, tuple[str, ...]]:
    """For each communication task, the devices that wait for what it carries."""
    graph = schedule.graph
    communication = {task for tasks in graph.communication.values() for task in tasks}
    receivers: dict[int, set[str]] = {task: set() for task in communication}
    if communication:
        for task, needs in enumerate(graph.needs):
            for need in needs:
                if need in communication and task not in communication:
                    receivers[need].add(graph.tasks[task].resource)
    return {task: tuple(sorted(devices)) for task, devices in receivers.items()}
