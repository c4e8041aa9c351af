import pytest

from gradweave.schedule import Costs, Kind, Link, Span, Task, Timeline, data_parallel, pipeline, plan, single


def span(lane, start, end, kind=Kind.F, number=0, step=0):
    return Span(lane, start, end, Task(kind, 0, end - start, lane, step=step), number)


def test_shares_and_exposed_communication():
    lanes = (("gpu0", "gpu0"), ("gpu1", "gpu1"), ("link", "link"))
    spans = (span("gpu0", 0, 4), span("link", 3, 7, Kind.C, number=1), span("gpu1", 6, 8), span("gpu1", 8, 10))
    timeline = Timeline(spans, lanes, receivers={1: ("gpu1",)})
    assert timeline.makespan == 10
    assert timeline.busy == {"gpu0": 0.4, "gpu1": 0.4, "link": 0.4}
    assert timeline.idle["gpu1"] == pytest.approx(0.6)
    # gpu1 receives from 3 to 7 and computes from 6: 3 s exposed, over two devices.
    assert timeline.exposed_communication == 1.5


def test_overlapping_streams_and_messages_are_not_counted_twice():
    lanes = (("main", "gpu"), ("side", "gpu"), ("a", "a"), ("b", "b"))
    spans = (span("main", 0, 2), span("side", 1, 3), span("a", 2, 6, Kind.C, 1), span("b", 4, 7, Kind.C, 2))
    timeline = Timeline(spans, lanes, receivers={1: ("gpu",), 2: ("gpu",)})
    assert timeline.exposed_communication == 4


def test_step_time_is_the_period_of_the_forwards():
    lanes = (("gpu", "gpu"),)
    forwards = tuple(span("gpu", start, start + 1, step=step) for step, start in enumerate((0, 5, 9, 16)))
    assert Timeline(forwards, lanes).step_time == 7
    assert Timeline(forwards, lanes, period=2).step_time == 5.5
    assert Timeline(forwards[:1], lanes).step_time == 1


def test_step_time_of_stock_order_is_the_work_of_a_step():
    costs = Costs.uniform(5)
    for steps in (1, 3):
        assert plan(single(costs, steps=steps), policy="in_order").simulate().step_time == 15


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        ("gpipe", 198),
        ("one_f_one_b", 198),
        ("interleaved", 171),
        ("zb_h1", 162),
        ("fast_forward", 144),
        ("modulo", 144),
    ],
)
def test_step_time_of_a_pipeline_does_not_depend_on_how_many_steps_are_shown(policy, seconds):
    """144 s is the work of a device; with the next forward to fill its bubble, fast_forward reaches it."""
    for steps in (1, 2, 4):
        graph = pipeline(Costs.uniform(24), stages=4, microbatches=8, steps=steps, next_forward=True)
        assert plan(graph, policy=policy).simulate().step_time == seconds


def test_a_single_step_takes_its_makespan():
    timeline = plan(pipeline(Costs.uniform(4), stages=2, microbatches=2), policy="gpipe").simulate()
    assert timeline.step_time == timeline.makespan


def test_exposed_communication_of_a_blocking_link():
    # One layer: nothing can hide the message of 4 s.
    graph = data_parallel(Costs.uniform(1), replicas=2, link=Link(0.25))
    timeline = plan(graph, policy="ddp").simulate()
    assert timeline.exposed_communication == 3
    assert timeline.step_time == 3 + 4 - 1


def test_an_empty_timeline_has_no_time():
    empty = Timeline((), (("gpu", "gpu"),))
    assert (empty.makespan, empty.step_time, empty.peak_bytes, empty.busy) == (0, 0, 0, {"gpu": 0})
