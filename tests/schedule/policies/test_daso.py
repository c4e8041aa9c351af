"""DASO's step time, exchanges and merges."""

import pytest

from gradweave.errors import ArgumentError
from gradweave.schedule import Costs, Kind, Link, hierarchical, plan

COMPUTE = 12.0  # Costs.uniform(4)


def scenario(exchange_seconds, every, wait, nodes=2, **more):
    """Nodes of two devices, free inside, whose exchange of 4 bytes takes the given time."""
    link = Link(2 * (nodes - 1) / nodes * 4 / exchange_seconds)
    steps = 6 * max(every, wait + 1)
    return hierarchical(Costs.uniform(4), nodes=nodes, local_ranks=2, link=link, steps=steps, **more)


@pytest.mark.parametrize("every", [1, 2, 4, 8])
@pytest.mark.parametrize("wait", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("exchange", [3.0, 12.0, 17.0, 30.0, 60.0])
def test_an_exchange_that_outlasts_its_wait_is_waited_for(every, exchange, wait):
    if wait > every:
        with pytest.raises(ArgumentError, match=f"wait={wait}: give at most every={every}: one exchange is under way"):
            plan(scenario(exchange, every, wait), policy="daso", every=every, wait=wait)
        return
    timeline = plan(scenario(exchange, every, wait), policy="daso", every=every, wait=wait).simulate()
    assert timeline.step_time == pytest.approx(COMPUTE + max(0.0, exchange - wait * COMPUTE) / every)


def test_a_single_node_has_only_its_links_inside():
    slow, fast = Link(1.0), Link(1e6)
    graph = hierarchical(Costs.uniform(4), nodes=1, local_ranks=8, link=slow, local_link=fast, steps=12)
    alike = hierarchical(Costs.uniform(4), nodes=1, local_ranks=8, link=fast, local_link=fast, steps=12)
    schedule = plan(graph, policy="daso")
    assert not any(task.note for task in schedule.graph.tasks), "nothing to exchange, and nothing to merge"
    assert schedule.simulate().peak_bytes == plan(graph, policy="ddp").simulate().peak_bytes
    for policy in ("ddp", "daso"):
        assert plan(graph, policy=policy).simulate().step_time == plan(alike, policy=policy).simulate().step_time


def test_without_wait_every_exchange_blocks():
    timeline = plan(scenario(8.0, 2, 0), policy="daso", every=2, wait=0).simulate()
    assert timeline.step_time == pytest.approx(COMPUTE + 8.0 / 2)


def test_half_the_bytes_take_half_the_time():
    graph = scenario(8.0, 2, 0)
    timeline = plan(graph, policy="daso", every=2, wait=0, payload="bfloat16").simulate()
    assert timeline.step_time == pytest.approx(COMPUTE + 4.0 / 2)
    with pytest.raises(ArgumentError, match="payload='int8'"):
        plan(graph, policy="daso", payload="int8")


def test_exchanges_and_merges_come_when_they_should():
    schedule = plan(scenario(3.0, 3, 2), policy="daso", every=3, wait=2)
    tasks, needs = schedule.graph.tasks, schedule.graph.needs
    exchanges = {i: t.step for i, t in enumerate(tasks) if t.note == "exchange"}
    assert list(exchanges.values()) == list(range(0, 18, 3))
    merges = {t.step: exchanges[needs[i][0]] for i, t in enumerate(tasks) if t.note.startswith("merge")}
    assert merges == {2: 0, 5: 3, 8: 6, 11: 9, 14: 12, 17: 15}
    timeline = schedule.simulate()
    merged = {s.task.step: s.end for s in timeline.spans if s.task.note.startswith("merge")}
    for span in timeline.spans:
        if span.task.kind is Kind.F and span.task.step - 1 in merged:
            assert span.start >= merged[span.task.step - 1]


def test_gradients_stay_inside_the_node():
    graph = scenario(3.0, 2, 1, local_link=Link(1.0))
    schedule = plan(graph, policy="daso", every=2, wait=1)
    local = [t for t in schedule.graph.tasks if t.resource == "local link"]
    assert len(local) == 4 * graph.steps
    assert {t.seconds for t in local} == {1.0}


def test_the_sent_copy_is_counted_until_it_is_merged():
    graph = scenario(3.0, 2, 1)
    sent = plan(graph, policy="daso", every=2, wait=1).simulate().peak_bytes
    flat = plan(graph, policy="ddp").simulate().peak_bytes
    assert sent == flat + 4


def test_beside_flat_ddp_it_gains_what_the_link_cost():
    graph = scenario(24.0, 4, 2, nodes=4)
    assert plan(graph, policy="daso", every=4, wait=2).simulate().step_time == pytest.approx(COMPUTE)
    assert plan(graph, policy="ddp").simulate().step_time > 2 * COMPUTE


def test_too_few_steps_to_see_a_period_are_refused():
    graph = hierarchical(Costs.uniform(4), nodes=2, local_ranks=2, link=Link(1.0), steps=8)
    with pytest.raises(ArgumentError, match="steps=8: give at least 9"):
        plan(graph, policy="daso", every=4, wait=1)


@pytest.mark.parametrize("options", [{"every": 0}, {"wait": -1}])
def test_senseless_options_are_rejected(options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        plan(scenario(3.0, 1, 1), policy="daso", **options)
