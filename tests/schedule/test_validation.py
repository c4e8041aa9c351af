from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave.errors import ArgumentError, ScheduleError
from gradweave.schedule import Costs, Family, Lane, pipeline, plan, single
from schedule.strategies import graphs


@pytest.fixture
def schedule():
    return plan(single(Costs.uniform(3)), policy="in_order")


def with_order(schedule, order):
    lane = schedule.lanes[0]
    return replace(schedule, lanes=(Lane(lane.name, lane.resource, tuple(order)),))


def test_a_sound_schedule_passes(schedule):
    schedule.validate(byte_budget=10**9)


def test_a_lost_task_is_named(schedule):
    lost = schedule.lanes[0].tasks[4]
    with pytest.raises(ScheduleError, match="loses") as error:
        with_order(schedule, [t for t in schedule.lanes[0].tasks if t != lost]).validate()
    assert schedule.graph.tasks[lost].label in str(error.value)


def test_a_repeated_task_is_named(schedule):
    again = schedule.lanes[0].tasks[2]
    with pytest.raises(ScheduleError, match="repeats") as error:
        with_order(schedule, [*schedule.lanes[0].tasks, again]).validate()
    assert schedule.graph.tasks[again].label in str(error.value)


def test_many_lost_tasks_are_counted(schedule):
    with pytest.raises(ScheduleError, match=r"loses F\(layer 0.* and 11 more"):
        with_order(schedule, []).validate()


def test_a_broken_dependency_names_both_tasks(schedule):
    order = list(schedule.lanes[0].tasks)
    order[0], order[1] = order[1], order[0]
    with pytest.raises(ScheduleError, match=r"breaks a dependency: it lists F\(layer 1.* before F\(layer 0"):
        with_order(schedule, order).validate()


@given(graphs(Family.SINGLE), st.data())
def test_any_swap_that_breaks_a_dependency_is_found(graph, data):
    schedule = plan(graph, policy="in_order")
    order = list(schedule.lanes[0].tasks)
    late = data.draw(st.sampled_from([i for i in order if graph.needs[i]] or order))
    if not graph.needs[late]:
        return
    early = data.draw(st.sampled_from(graph.needs[late]))
    a, b = order.index(early), order.index(late)
    order[a], order[b] = order[b], order[a]
    with pytest.raises(ScheduleError, match="breaks a dependency"):
        with_order(schedule, order).validate()


def test_a_task_on_the_wrong_device_is_named():
    schedule = plan(pipeline(Costs.uniform(2), stages=2, microbatches=1), policy="gpipe")
    first, second = schedule.lanes
    swapped = replace(schedule, lanes=(replace(first, tasks=second.tasks), replace(second, tasks=first.tasks)))
    with pytest.raises(ScheduleError, match=r"lane 'gpu0' of 'gpu0' lists F\(layer 1.*belongs to 'gpu1'"):
        swapped.validate()


def test_tasks_and_waits_outside_the_graph_and_lanes_of_one_name_are_rejected(schedule):
    with pytest.raises(ScheduleError, match="lists task 99"):
        with_order(schedule, [99]).validate()
    with pytest.raises(ScheduleError, match="waits for task 99"):
        replace(schedule, waits=((0, 99),)).validate()
    with pytest.raises(ScheduleError, match="two lanes are called"):
        replace(schedule, lanes=schedule.lanes * 2).validate()


def test_a_passed_byte_budget_names_device_instant_and_task(schedule):
    peak = schedule.simulate().peak_bytes
    schedule.validate(byte_budget=peak)
    with pytest.raises(
        ScheduleError, match=rf"byte_budget={peak - 1}: in_order holds {peak} bytes on gpu0 at .* s, during"
    ):
        schedule.validate(byte_budget=peak - 1)


def test_the_budget_holds_on_every_device():
    graph = pipeline(Costs.uniform(4), stages=2, microbatches=4)
    schedule = plan(graph, policy="one_f_one_b")
    peaks = {device: max(size for _, size in points) for device, points in schedule.simulate().memory.items()}
    least, most = sorted(peaks, key=peaks.get)
    for flipped in (schedule, replace(schedule, graph=replace(schedule.graph, buffers=schedule.graph.buffers[::-1]))):
        with pytest.raises(ScheduleError, match=f"on {most} at"):
            flipped.validate(byte_budget=peaks[least])


def test_a_senseless_byte_budget_is_rejected(schedule):
    with pytest.raises(ArgumentError, match="byte_budget=0"):
        schedule.validate(byte_budget=0)
