"""The check of executors passes what the simulator runs, and names each way in which a trace can depart from it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executed_is_planned import NotAsPlannedError, check_executed, check_timeline
from gradweave.schedule import (
    POLICIES,
    Costs,
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
    hierarchical,
    pipeline,
    plan,
    single,
)
from schedule.strategies import schedules

SCENARIOS = {
    Family.SINGLE: single(Costs.uniform(4), steps=2),
    Family.DATA_PARALLEL: data_parallel(Costs.uniform(4), replicas=4, link=Link(1.0), steps=2),
    Family.PIPELINE: pipeline(Costs.uniform(4), stages=2, microbatches=4, link=Link(5.0)),
    Family.HIERARCHICAL: hierarchical(Costs.uniform(4), nodes=2, local_ranks=2, link=Link(1.0), steps=9),
}


@pytest.mark.parametrize(
    ("name", "family"), [(name, family) for name in POLICIES for family in POLICIES[name].families]
)
def test_the_simulator_runs_every_policy_as_planned(name, family):
    schedule = plan(SCENARIOS[family], policy=name)
    check_timeline(schedule, schedule.simulate())


@given(schedules())
def test_the_simulator_runs_every_schedule_as_planned(schedule):
    check_timeline(schedule, schedule.simulate())


@pytest.fixture
def schedule():
    """Two streams, with an event between them."""
    return plan(single(Costs.uniform(2)), policy="forward_fusion")


def events_of(schedule):
    return [(span.lane, span.number, span.start, span.end) for span in schedule.simulate().spans]


def task_of(schedule, kind, layer, step=0):
    return schedule.graph.find(kind, [layer], step)[0]


def test_the_order_of_the_events_is_of_no_account(schedule):
    check_executed(schedule, events_of(schedule)[::-1])


def test_order_numbers_serve_as_times(schedule):
    events = sorted(events_of(schedule), key=lambda event: event[2:])
    check_executed(schedule, [(lane, task, n, n + 1) for n, (lane, task, _, _) in enumerate(events)])


def test_a_task_that_did_not_run_is_named(schedule):
    lost = task_of(schedule, Kind.W, 1)
    with pytest.raises(NotAsPlannedError, match=r"1 of 10 tasks did not run: W\(layer 1"):
        check_executed(schedule, [event for event in events_of(schedule) if event[1] != lost])


def test_nothing_ran(schedule):
    with pytest.raises(NotAsPlannedError, match="10 of 10 tasks did not run"):
        check_executed(schedule, [])


def test_a_task_that_ran_twice_is_named(schedule):
    lane, task, _, _ = events_of(schedule)[0]
    with pytest.raises(NotAsPlannedError, match=r"F\(layer 0.* ran again, on lane 'gpu0 main' at 99"):
        check_executed(schedule, [*events_of(schedule), (lane, task, 99.0, 100.0)])


def test_a_task_on_another_lane_is_named(schedule):
    update = task_of(schedule, Kind.U, 1)
    moved = [("gpu0 main" if task == update else lane, task, *times) for lane, task, *times in events_of(schedule)]
    with pytest.raises(NotAsPlannedError, match=r"U\(layer 1.* ran on lane 'gpu0 main'; it was planned on 'gpu0 side'"):
        check_executed(schedule, moved)


def test_a_lane_and_a_task_that_were_not_planned_are_named(schedule):
    with pytest.raises(NotAsPlannedError, match="ran on lane 'gpu1 main'; the schedule has gpu0 main, gpu0 side"):
        check_executed(schedule, [("gpu1 main", 0, 0.0, 1.0)])
    with pytest.raises(NotAsPlannedError, match="task 10 ran on lane 'gpu0 main'; the graph has 10 tasks"):
        check_executed(schedule, [("gpu0 main", 10, 0.0, 1.0)])


def test_a_task_that_ended_before_it_started_is_named(schedule):
    (lane, task, start, end), *others = events_of(schedule)
    with pytest.raises(NotAsPlannedError, match=r"started at 1\.0 and ended at 0\.0"):
        check_executed(schedule, [(lane, task, end, start), *others])


def test_two_tasks_at_once_on_a_lane_are_named(schedule):
    (lane, task, start, end), *others = events_of(schedule)
    with pytest.raises(NotAsPlannedError, match=r"two tasks at once: F\(layer 1.*before F\(layer 0.* ended at 1.5"):
        check_executed(schedule, [(lane, task, start, end + 0.5), *others])


def exchanged(events, one, other):
    """Return the events with the times of two tasks exchanged."""
    times = {task: (start, end) for _, task, start, end in events}
    times[one], times[other] = times[other], times[one]
    return [(lane, task, *times[task]) for lane, task, _, _ in events]


def test_another_order_on_a_lane_is_named(schedule):
    w, x = task_of(schedule, Kind.W, 0), task_of(schedule, Kind.X, 0)
    with pytest.raises(NotAsPlannedError, match=r"ran X\(layer 0.*before W\(layer 0.*planned after it"):
        check_executed(schedule, exchanged(events_of(schedule), w, x))


def test_a_dependency_that_was_not_awaited_is_named(schedule):
    first, second = task_of(schedule, Kind.F, 0), task_of(schedule, Kind.F, 1)
    with pytest.raises(NotAsPlannedError, match=r"F\(layer 1.*before the end.*F\(layer 0.*, which it needs"):
        check_executed(schedule, exchanged(events_of(schedule), first, second))


def test_a_wait_that_was_not_awaited_is_named(schedule):
    # The update of layer 0 has its gradients, but backward is not done: its last X still runs.
    first, last = task_of(schedule, Kind.U, 0), task_of(schedule, Kind.X, 0)
    waits = ((first, last),)
    graph = replace(schedule.graph, needs=tuple(() if i == first else n for i, n in enumerate(schedule.graph.needs)))
    early = [(lane, i, *((0.0, 0.0) if i == first else times)) for lane, i, *times in events_of(schedule)]
    check_executed(replace(schedule, graph=graph, waits=()), early)
    with pytest.raises(NotAsPlannedError, match=r"U\(layer 0.*X\(layer 0.*, which it waits for"):
        check_executed(replace(schedule, graph=graph, waits=waits), early)


def queue(discipline):
    """Return a lane of two messages, the second of which is ready first."""
    made = [Task(Kind.W, layer, 1.0, "gpu0") for layer in (0, 1)]
    sent = [Task(Kind.C, layer, 1.0, "link") for layer in (1, 0)]
    costs = Costs(tuple(LayerCost(f"layer{i}", 1, 1, 1) for i in range(2)))
    graph = TaskGraph(Family.SINGLE, (*made, *sent), ((), (), (1,), (0,)), (), costs)
    return Schedule(graph, (Lane("gpu0", "gpu0", (0, 1)), Lane("link", "link", (2, 3), discipline)))


COMPUTED = [("gpu0", 0, 0.0, 1.0), ("gpu0", 1, 1.0, 2.0)]
BY_ARRIVAL = [("link", 3, 2.5, 3.0), ("link", 2, 3.0, 4.0)]
AS_LISTED = [("link", 2, 2.5, 3.0), ("link", 3, 3.0, 4.0)]


@pytest.mark.parametrize(
    ("discipline", "right", "wrong", "message"),
    [
        (Discipline.IN_ORDER, AS_LISTED, BY_ARRIVAL, r"ran C\(layer 0.*before C\(layer 1.*planned after it"),
        (Discipline.FIFO, BY_ARRIVAL, AS_LISTED, r"ran C\(layer 0.*after C\(layer 1.*arrived at 1.0 and 2.0"),
        (Discipline.PRIORITY, AS_LISTED, BY_ARRIVAL, r"started C\(layer 0.*C\(layer 1.*was ready at 2.0"),
        (Discipline.PREEMPTIVE, AS_LISTED, BY_ARRIVAL, r"started C\(layer 0.*C\(layer 1.*was ready at 2.0"),
    ],
)
def test_each_discipline_has_an_order_of_its_own(discipline, right, wrong, message):
    check_executed(queue(discipline), [*COMPUTED, *right])
    with pytest.raises(NotAsPlannedError, match=message):
        check_executed(queue(discipline), [*COMPUTED, *wrong])


def test_only_a_lane_that_interrupts_may_run_a_task_in_parts():
    parts = [("link", 3, 1.0, 1.5), ("link", 2, 2.0, 3.0), ("link", 3, 3.0, 3.5)]
    check_executed(queue(Discipline.PREEMPTIVE), [*COMPUTED, *parts])
    with pytest.raises(NotAsPlannedError, match=r"C\(layer 0.* ran again"):
        check_executed(queue(Discipline.FIFO), [*COMPUTED, *parts])


@given(schedules(one_stream_per_device=True), st.data())
def test_a_task_that_starts_too_early_is_found(schedule, data):
    graph = schedule.graph
    late = [i for i, needs in enumerate(graph.needs) if any(graph.tasks[n].seconds > 0.01 for n in needs)]
    if not late:
        return
    task = data.draw(st.sampled_from(late))
    events = [(lane, i, *((-1.0, -1.0) if i == task else times)) for lane, i, *times in events_of(schedule)]
    with pytest.raises(NotAsPlannedError):
        check_executed(schedule, events)
