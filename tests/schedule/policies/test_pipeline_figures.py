"""Makespans of the pipeline policies for layers of one second each, against known figures."""

import pytest

from gradweave.schedule import Costs, LayerCost, Link, pipeline, plan

SIZES = [(4, 24, 4), (8, 24, 8), (8, 24, 30), (16, 48, 32)]


def makespan(policy, stages, layers, microbatches, **more):
    options = more.pop("options", {})
    graph = pipeline(Costs.uniform(layers), stages=stages, microbatches=microbatches, **more)
    return plan(graph, policy=policy, **options).simulate().makespan


@pytest.mark.parametrize(("size", "seconds"), list(zip(SIZES, (126, 135, 333, 423), strict=True)))
def test_gpipe(size, seconds):
    assert makespan("gpipe", *size) == seconds


@pytest.mark.parametrize(("size", "seconds"), list(zip(SIZES, (90, 93, 291, 333), strict=True)))
def test_fast_forward(size, seconds):
    assert makespan("fast_forward", *size) <= seconds


@pytest.mark.parametrize(("size", "seconds"), list(zip(SIZES, (75, 79, 277, 303), strict=True)))
def test_modulo(size, seconds):
    assert makespan("modulo", *size) <= seconds


def test_a_transfer_of_one_layer_time_erases_the_lead_of_modulo():
    free = {policy: makespan(policy, 4, 24, 4) for policy in ("fast_forward", "modulo")}
    slow = {policy: makespan(policy, 4, 24, 4, link=Link(1.0)) for policy in ("fast_forward", "modulo")}
    assert free["modulo"] < free["fast_forward"]
    assert slow["modulo"] >= slow["fast_forward"]


def test_groups_divide_the_messages_and_multiply_the_bubble():
    for group in (1, 2, 3):
        assert makespan("modulo", 4, 24, 4, options={"group": group}) == 72 + 3 * group


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("cost", [(1, 1, 1), (2, 2, 1), (1, 2, 1), (3, 2, 2)])
def test_closed_bubble_formulas(stages, cost):
    """With F, B = X + W and W the times of a stage; ZB-H1's holds where W is no longer than F and X."""
    f, x, w = cost
    for microbatches in (2 * stages, 2 * stages + 1, 4 * stages):
        for layers_per_stage in (1, 3):
            layer = LayerCost("layer", f, x, w)
            costs = Costs((layer,) * (stages * layers_per_stage))
            graph = pipeline(costs, stages=stages, microbatches=microbatches)
            work = microbatches * layers_per_stage * (f + x + w)
            bubbles = {
                "gpipe": (stages - 1) * (f + x + w),
                "one_f_one_b": (stages - 1) * (f + x + w),
                "zb_h1": (stages - 1) * (f + (x + w) - 2 * w),
                "fast_forward": (stages - 1) * f,
            }
            for policy, bubble in bubbles.items():
                timeline = plan(graph, policy=policy).simulate()
                assert timeline.makespan - work == bubble * layers_per_stage, policy


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (2, 2), (4, 2), (4, 3), (8, 3)])
def test_interleaving_divides_the_bubble(stages, chunks):
    layers, microbatches = stages * chunks, 2 * stages
    work = microbatches * chunks * 3
    seconds = makespan("interleaved", stages, layers, microbatches, options={"chunks": chunks})
    assert seconds - work == (stages - 1) * 3
