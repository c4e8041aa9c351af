import itertools

import pytest
from hypothesis import given

from gradweave.errors import ScheduleError
from gradweave.schedule import (
    Buffer,
    Costs,
    Demand,
    Discipline,
    Family,
    Kind,
    Lane,
    LayerCost,
    Link,
    Schedule,
    Task,
    TaskGraph,
    data_parallel,
    plan,
)
from reference.ticking_simulator import simulate_by_ticks
from schedule.strategies import schedules

EPSILON = 1e-9


def make(tasks, needs, lanes, buffers=(), waits=()):
    graph = TaskGraph(Family.SINGLE, tuple(tasks), tuple(needs), tuple(buffers), Costs.uniform(1))
    return Schedule(graph, tuple(lanes), tuple(waits))


def task(seconds, resource="gpu", kind=Kind.F, layer=0, **more):
    return Task(kind, layer, seconds, resource, **more)


def times(timeline):
    return {span.number: (span.start, span.end) for span in timeline.spans}


@given(schedules(whole_seconds=True, one_stream_per_device=True))
def test_agrees_with_a_simulator_that_looks_at_every_tick(schedule):
    timeline = schedule.simulate()
    expected = simulate_by_ticks(schedule)
    starts, ends = {}, {}
    for span in timeline.spans:
        starts[span.number] = min(starts.get(span.number, span.start), span.start)
        ends[span.number] = max(ends.get(span.number, 0.0), span.end)
    assert {i: (starts[i], ends[i]) for i in starts} == expected


@given(schedules())
def test_bounds_dependencies_and_exclusiveness(schedule):
    timeline = schedule.simulate()
    graph = schedule.graph
    assert timeline.makespan >= graph.critical_path * (1 - EPSILON)
    assert timeline.makespan <= graph.serial_seconds * (1 + EPSILON)
    for resource in {task.resource for task in graph.tasks}:
        own = [task for task in graph.tasks if task.resource == resource]
        streams = sum(lane.resource == resource for lane in schedule.lanes)
        assert timeline.makespan >= sum(task.seconds for task in own) / streams * (1 - EPSILON)
        if streams > 1:
            work = max(sum(t.seconds * t.demand.compute for t in own), sum(t.seconds * t.demand.memory for t in own))
            assert timeline.makespan >= work * (1 - EPSILON)
    start = {}
    end = {}
    for span in timeline.spans:
        start.setdefault(span.number, span.start)
        end[span.number] = span.end
    assert start.keys() == set(range(len(graph.tasks)))
    for i, needs in enumerate(graph.needs):
        for need in needs:
            assert start[i] >= end[need]
    for lane in schedule.lanes:
        spans = sorted((s.start, s.end) for s in timeline.spans if s.lane == lane.name)
        for (_, before), (after, _) in itertools.pairwise(spans):
            assert after >= before


@given(schedules())
def test_memory_returns_to_zero_and_is_never_negative(schedule):
    timeline = schedule.simulate()
    for points in timeline.memory.values():
        assert all(size >= 0 for _, size in points)
        assert points[-1][1] == 0


@given(schedules())
def test_is_deterministic(schedule):
    assert schedule.simulate() == schedule.simulate()


def test_streams_of_one_device_share_it_as_their_demands_allow():
    half, most = Demand(0.5, 0.5), Demand(0.75, 0.0)
    lanes = [Lane("main", "gpu", (0,)), Lane("side", "gpu", (1,))]
    side_by_side = make([task(4, demand=half), task(4, demand=half)], [(), ()], lanes).simulate()
    assert times(side_by_side) == {0: (0, 4), 1: (0, 4)}
    crowded = make([task(4, demand=most), task(2, demand=most)], [(), ()], lanes).simulate()
    # Both at 1/1.5 speed: the short one ends at 3, with 2 s of the long one left to run alone.
    assert times(crowded) == {0: (0, 5), 1: (0, 3)}
    memory = Demand(0.0, 0.75)
    assert make([task(4, demand=memory), task(2, demand=memory)], [(), ()], lanes).simulate().makespan == 5
    different = make([task(4, demand=memory), task(4, demand=most)], [(), ()], lanes).simulate()
    assert different.makespan == 4
    saturated = make([task(4), task(2)], [(), ()], lanes).simulate()
    assert saturated.makespan == 6


def test_links_serve_by_arrival_by_priority_or_interrupting():
    # Task 0 makes message 2 ready at 1; task 1 makes message 3 ready at 2; message 2 takes 10.
    tasks = [task(1), task(1), task(10, "link", Kind.C, 1), task(1, "link", Kind.C, 0), task(2, "link", Kind.C, 2)]
    needs = [(), (0,), (0,), (1,), ()]

    def ends(discipline, listed):
        lanes = [Lane("gpu", "gpu", (0, 1)), Lane("link", "link", listed, discipline)]
        timeline = make(tasks, needs, lanes).simulate()
        return {i: max(s.end for s in timeline.spans if s.number == i) for i in (2, 3, 4)}, timeline

    assert ends(Discipline.FIFO, (4, 3, 2))[0] == {4: 2, 2: 12, 3: 13}
    assert ends(Discipline.PRIORITY, (3, 2, 4))[0] == {4: 2, 3: 3, 2: 13}
    interrupted, timeline = ends(Discipline.PREEMPTIVE, (3, 2, 4))
    assert interrupted == {3: 3, 2: 12, 4: 13}
    assert [(s.start, s.end) for s in timeline.spans if s.number == 4] == [(0, 1), (12, 13)]
    assert ends(Discipline.IN_ORDER, (2, 3, 4))[0] == {2: 11, 3: 12, 4: 14}


def test_bytes_live_from_the_first_user_to_the_last():
    buffers = [Buffer(5, "gpu", (0, 2)), Buffer(7, "gpu", (1,))]
    timeline = make([task(1), task(1), task(1)], [(), (0,), (1,)], [Lane("gpu", "gpu", (0, 1, 2))], buffers).simulate()
    assert timeline.memory["gpu"] == ((0.0, 0), (0.0, 5), (1.0, 12), (2.0, 5), (3.0, 0))
    assert timeline.peak_bytes == 12


def test_bytes_freed_at_an_instant_are_free_for_what_starts_then():
    buffers = [Buffer(5, "gpu", (0,)), Buffer(5, "gpu", (1,))]
    timeline = make([task(1), task(1)], [(), (0,)], [Lane("gpu", "gpu", (0, 1))], buffers).simulate()
    assert timeline.peak_bytes == 5


def test_a_stream_waits_for_events_of_another():
    lanes = [Lane("a", "gpu0", (0,)), Lane("b", "gpu1", (1,))]
    timeline = make([task(3, "gpu0"), task(1, "gpu1")], [(), ()], lanes, waits=[(1, 0)]).simulate()
    assert times(timeline)[1] == (3, 4)


def test_a_deadlock_names_the_stuck_tasks():
    # Each lane's first task needs the other lane's second.
    tasks = [task(1, "gpu0", layer=0), task(1, "gpu1", layer=1), task(1, "gpu1", layer=2), task(1, "gpu0", layer=3)]
    schedule = make(tasks, [(), (), (0,), (1,)], [Lane("a", "gpu0", (3, 0)), Lane("b", "gpu1", (2, 1))])
    with pytest.raises(ScheduleError, match=r"deadlocks at 0 s: a is stuck at F\(layer 3.*waits for F\(layer 1"):
        schedule.simulate()


def test_communication_that_burdens_the_device_slows_what_it_runs_beside():
    """Two layers of one second each; the message of the second takes two, and half of the device."""
    costs = Costs(tuple(LayerCost(f"{i}", 1.0, 1.0, 1.0, 0.0, parameter_bytes=20 * i) for i in range(2)))

    def step(device_seconds):
        graph = data_parallel(costs, replicas=2, link=Link(10.0, device_seconds=device_seconds), next_forward=False)
        return plan(graph, policy="ddp", bucket_bytes=0).simulate().makespan

    assert step(0.0) == 6.0
    assert step(0.05) == 7.0
