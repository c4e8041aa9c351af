"""Fast-forwarding within a bound of bytes."""

import pytest

from gradweave.errors import ArgumentError
from gradweave.schedule import Costs, Kind, LayerCost, Link, pipeline, plan
from gradweave.schedule.policies.memory_bounded import ENDLESS, Backlog

LAYER = LayerCost("layer", 1, 1, 1, 0.1, input_bytes=10, output_bytes=10)


def graph(layers=8, stages=4, microbatches=8, **options):
    return pipeline(Costs((LAYER,) * layers), stages=stages, microbatches=microbatches, **options)


def peak(schedule):
    return schedule.simulate().peak_bytes


@pytest.mark.parametrize("link", [Link(), Link(100.0, 0.01)])
def test_no_slower_than_modulo_where_nothing_bounds_it(link):
    known = plan(graph(link=link), policy="modulo").simulate()
    found = plan(graph(link=link), policy="memory_bounded").simulate()
    assert found.makespan <= known.makespan * 1.005


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.4, 0.3])
def test_a_budget_is_kept_at_the_price_of_time(share):
    free = plan(graph(), policy="modulo").simulate()
    budget = int(share * free.peak_bytes)
    found = plan(graph(), policy="memory_bounded", byte_budget=budget).simulate(byte_budget=budget)
    assert found.peak_bytes <= budget
    assert found.makespan <= graph().serial_seconds


def test_what_one_micro_batch_needs_is_enough():
    one = peak(plan(graph(microbatches=1), policy="modulo"))
    assert peak(plan(graph(), policy="memory_bounded", byte_budget=one)) <= one


def test_a_budget_that_nothing_keeps_to_is_refused():
    with pytest.raises(ArgumentError, match="byte_budget=9: give at least 30: one micro-batch holds as much"):
        plan(graph(), policy="memory_bounded", byte_budget=9)
    with pytest.raises(ArgumentError, match="byte_budget=0: give a positive number"):
        plan(graph(), policy="memory_bounded", byte_budget=0)


def waiting(schedule, device):
    """Most weight gradients that were ready on a device and had not begun when a forward began."""
    spans = [span for span in schedule.simulate().spans if span.lane == device]
    begins = {(s.task.kind, s.task.layer, s.task.microbatch): s.start for s in spans}
    ends = {(s.task.kind, s.task.layer, s.task.microbatch): s.end for s in spans}
    return max(
        sum(
            kind is Kind.X and end <= span.start < begins[Kind.W, layer, microbatch]
            for (kind, layer, microbatch), end in ends.items()
        )
        for span in spans
        if span.task.kind is Kind.F
    )


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_no_more_weight_gradients_wait_than_the_backlog_allows(limit):
    assert waiting(plan(graph(microbatches=12), policy="memory_bounded", backlog=ENDLESS), "gpu0") > 2
    bounded = plan(graph(microbatches=12), policy="memory_bounded", backlog=Backlog(limit))
    assert waiting(bounded, "gpu0") <= limit
