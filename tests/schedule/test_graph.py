import pytest

from gradweave.errors import ArgumentError, ScheduleError
from gradweave.schedule import Buffer, Costs, Family, Kind, Task, TaskGraph, pipeline, plan, single


def test_tasks_are_found_by_what_they_are():
    graph = pipeline(Costs.uniform(3), stages=1, microbatches=2, steps=2)
    (found,) = graph.find(Kind.W, [1], step=1, microbatch=1)
    task = graph.tasks[found]
    assert (task.kind, task.layer, task.microbatch, task.step) == (Kind.W, 1, 1, 1)


def test_a_cycle_cannot_be_written_down():
    tasks = (Task(Kind.F, 0, 1.0), Task(Kind.F, 1, 1.0))
    with pytest.raises(ScheduleError, match=r"F\(layer 0.*depends on task 1"):
        TaskGraph(Family.SINGLE, tasks, ((1,), ()), (), Costs.uniform(2))
    with pytest.raises(ArgumentError, match="needs=1"):
        TaskGraph(Family.SINGLE, tasks, ((),), (), Costs.uniform(2))


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e300])
def test_senseless_durations_are_named(seconds):
    with pytest.raises(ArgumentError, match=r"seconds of F\(layer 0"):
        TaskGraph(Family.SINGLE, (Task(Kind.F, 0, seconds),), ((),), (), Costs.uniform(1))


@pytest.mark.parametrize("buffer", [Buffer(1, "gpu", (7,)), Buffer(-1, "gpu", (0,)), Buffer(1, "gpu", ())])
def test_senseless_buffers_are_named(buffer):
    with pytest.raises(ArgumentError, match="buffers=Buffer"):
        TaskGraph(Family.SINGLE, (Task(Kind.F, 0, 1.0),), ((),), (buffer,), Costs.uniform(1))


def test_critical_path_and_serial_sum():
    graph = single(Costs.uniform(4), next_forward=False)
    # Down four layers, up three, and the last W or X; updates are free.
    assert graph.critical_path == 8
    assert graph.serial_seconds == 12


def test_devices_and_links_are_listed():
    graph = plan(pipeline(Costs.uniform(4), stages=2, microbatches=1), policy="gpipe").graph
    assert graph.devices == ("gpu0", "gpu1")
    assert graph.communication == {}


def test_successors_are_the_inverse_of_needs():
    graph = single(Costs.uniform(3))
    pairs = {(need, task) for task, needs in enumerate(graph.needs) for need in needs}
    assert pairs == {(task, after) for task, afters in enumerate(graph.successors) for after in afters}
