"""Micro-batches that the pipeline policies keep in flight."""

import pytest

from gradweave.errors import ArgumentError
from gradweave.schedule import Costs, Kind, LayerCost, pipeline, plan

STAGES, MICROBATCHES = 4, 12
INPUTS_ONLY = Costs((LayerCost("layer", 1, 1, 1, input_bytes=1),) * STAGES)


def in_flight(policy, **options):
    """Return the most inputs kept at once on each stage."""
    graph = pipeline(INPUTS_ONLY, stages=STAGES, microbatches=MICROBATCHES)
    timeline = plan(graph, policy=policy, **options).simulate()
    return [max(size for _, size in timeline.memory[f"gpu{stage}"]) for stage in range(STAGES)]


def test_gpipe_keeps_all_and_1f1b_as_many_as_stages_to_come():
    assert in_flight("gpipe") == [MICROBATCHES] * STAGES
    assert in_flight("one_f_one_b") == [4, 3, 2, 1]


def test_zb_h1_keeps_no_more_than_the_first_stage_of_1f1b():
    assert max(in_flight("zb_h1")) == STAGES


@pytest.mark.parametrize("policy", ["gpipe", "one_f_one_b", "zb_h1", "fast_forward", "modulo"])
@pytest.mark.parametrize("cap", [1, 2, 3, 5])
def test_a_cap_on_micro_batches_in_flight_is_kept(policy, cap):
    assert max(in_flight(policy, max_in_flight=cap)) <= cap


def test_interleaved_is_capped_in_whole_rounds():
    costs = Costs(INPUTS_ONLY.layers * 2)
    graph = pipeline(costs, stages=STAGES, microbatches=12)
    free, capped = (plan(graph, policy="interleaved", max_in_flight=cap).simulate() for cap in (None, 4))
    assert capped.peak_bytes <= 2 * 4
    assert capped.makespan > free.makespan
    with pytest.raises(ArgumentError, match="max_in_flight=3: interleaved needs a multiple of the 4 stages"):
        plan(graph, policy="interleaved", max_in_flight=3)


@pytest.mark.parametrize("policy", ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "fast_forward", "modulo"])
def test_a_cap_that_admits_nothing_is_rejected(policy):
    graph = pipeline(INPUTS_ONLY, stages=STAGES, microbatches=4)
    with pytest.raises(ArgumentError, match="max_in_flight=0"):
        plan(graph, policy=policy, max_in_flight=0)


def test_interleaved_needs_enough_layers_and_even_micro_batches():
    with pytest.raises(ArgumentError, match="chunks=3: give at most 2: 8 layers on 4 stages"):
        plan(pipeline(Costs.uniform(8), stages=4, microbatches=4), policy="interleaved", chunks=3)
    with pytest.raises(ArgumentError, match="microbatches=6: interleaved needs a multiple of the 4 stages"):
        plan(pipeline(Costs.uniform(8), stages=4, microbatches=6), policy="interleaved")
    with pytest.raises(ArgumentError, match="chunks=0"):
        plan(pipeline(Costs.uniform(8), stages=4, microbatches=4), policy="interleaved", chunks=0)
    with pytest.raises(ArgumentError, match="group=3: give at most 2: 8 layers on 4 stages"):
        plan(pipeline(Costs.uniform(8), stages=4, microbatches=4), policy="modulo", group=3)
    with pytest.raises(ArgumentError, match="group=0"):
        plan(pipeline(Costs.uniform(8), stages=4, microbatches=4), policy="modulo", group=0)


def test_the_next_forward_follows_the_updates():
    graph = pipeline(Costs.uniform(8), stages=2, microbatches=4, steps=2, next_forward=True)
    for policy in ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "fast_forward", "modulo"):
        timeline = plan(graph, policy=policy).simulate()
        updated = {s.task.layer: s.end for s in timeline.spans if s.task.kind is Kind.U and s.task.step == 1}
        for span in timeline.spans:
            if span.task.kind is Kind.F and span.task.step == 2:
                assert span.start >= updated[span.task.layer]
