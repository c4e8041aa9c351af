"""Fusion and weight-gradient placement on one device."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave.errors import ArgumentError
from gradweave.schedule import Costs, Demand, Family, Kind, LayerCost, network, plan, single
from gradweave.schedule.policies.regions import _bounds, make_regions, place_weight_gradients, saved_share
from schedule.strategies import graphs

HALF = Demand(0.5, 0.5)
ALL = ("in_order", "backward_fusion", "forward_fusion", "side_stream", "joint", "cross_step", "side_region")


def layered(count, demand=HALF, **more):
    demands = {f"{part}_demand": demand for part in ("forward", "input_grad", "weight_grad", "update")}
    layers = [
        LayerCost(
            f"l{i}", 1, 1, 1, 1, input_bytes=1, output_bytes=1, parameter_bytes=1, block=f"b{i // 2}", **demands, **more
        )
        for i in range(count)
    ]
    return Costs(tuple(layers))


def simulate(policy, costs, **options):
    return plan(single(costs, steps=2), policy=policy, **options).simulate()


def order(policy, costs):
    schedule = plan(single(costs), policy=policy)
    return [
        "".join(f"{schedule.graph.tasks[i].kind}{schedule.graph.tasks[i].layer} " for i in lane.tasks).strip()
        for lane in schedule.lanes
    ]


def test_orders():
    costs = layered(2)
    assert order("in_order", costs) == ["F0 F1 W1 X1 W0 X0 U0 U1 F0 F1"]
    assert order("backward_fusion", costs) == ["F0 F1 W1 X1 U1 W0 X0 U0 F0 F1"]
    assert order("forward_fusion", costs) == ["F0 F1 W1 X1 W0 X0 F0 F1", "U0 U1"]
    assert order("side_stream", costs) == ["F0 F1 X1 X0 U0 U1 F0 F1", "W1 W0"]
    assert order("side_region", costs) == ["F0 F1 X1 W0 X0 U0 F0 F1", "W1 U1"]


def test_backward_fusion_frees_each_gradient_at_once():
    heavy = Costs((LayerCost("l", 1, 1, 1, 1, parameter_bytes=100),) * 6)
    assert simulate("in_order", heavy).peak_bytes == 600
    assert simulate("backward_fusion", heavy).peak_bytes == 100


def test_forward_fusion_hides_updates_beside_the_forward_but_not_before_backward_ends():
    costs = layered(6)
    timeline = simulate("forward_fusion", costs)
    # All but the first layer's update.
    assert timeline.step_time == simulate("in_order", costs).step_time - 5
    backward_end = max(s.end for s in timeline.spans if s.task.kind in (Kind.X, Kind.W) and s.task.step == 0)
    assert min(s.start for s in timeline.spans if s.task.kind is Kind.U) == backward_end


def test_side_stream_hides_weight_gradients_beside_input_gradients():
    assert simulate("side_stream", layered(6)).step_time == simulate("in_order", layered(6)).step_time - 6


@pytest.mark.parametrize("policy", ALL)
def test_nothing_is_promised_on_a_saturated_device(policy):
    costs = layered(6, Demand())
    assert simulate(policy, costs).step_time == pytest.approx(simulate("in_order", costs).step_time)


def test_joint_keeps_what_gains_nothing_on_the_main_stream():
    full = [replace(layer, block="full") for layer in layered(2, Demand()).layers]
    costs = Costs((*full, *layered(2).layers))
    main, side = plan(single(costs), policy="joint").lanes
    graph = single(costs)
    assert {graph.tasks[i].layer for i in side.tasks} == {2, 3}
    assert {graph.tasks[i].layer for i in main.tasks if graph.tasks[i].kind is Kind.W} == {0, 1}


def test_weight_gradients_go_where_they_save_most():
    # Block b1 (layers 2, 3) runs first in backward and fills the device; b0 leaves room.
    busy, idle, light = Demand(1.0, 0.0), Demand(0.2, 0.0), Demand(0.6, 0.0)
    layers = tuple(
        LayerCost(f"l{i}", 1, 4, 1, input_bytes=1, output_bytes=1, block=f"b{i // 2}",
                  input_grad_demand=busy if i >= 2 else idle, weight_grad_demand=light)
        for i in range(4)
    )  # fmt: skip
    graph = single(Costs(layers))
    assert saved_share(light, idle) == 1.0
    assert saved_share(light, busy) == pytest.approx(0.4)
    regions = make_regions(graph, with_next_forward=False)
    assert [region.layers for region in regions] == [[2, 3], [0, 1]]
    assert [r.beside for r in place_weight_gradients(graph, regions, 10**9).regions] == [[], [3, 2, 1, 0]]
    # With nothing to be held, each stays beside its own block.
    regions = make_regions(graph, with_next_forward=False)
    assert [r.beside for r in place_weight_gradients(graph, regions, 0).regions] == [[3, 2], [1, 0]]


def test_a_weight_gradient_may_run_from_its_own_block_to_the_block_before_its_use():
    graph = single(layered(6))
    regions = make_regions(graph, with_next_forward=True)
    # Backward through blocks 2, 1, 0, then forward through 0, 1, 2.
    assert _bounds(graph, regions) == [(2, 2), (2, 2), (1, 3), (1, 3), (0, 4), (0, 4)]
    regions = make_regions(graph, with_next_forward=False)
    assert _bounds(graph, regions) == [(2, 2), (2, 2), (1, 2), (1, 2), (0, 2), (0, 2)]


@given(graphs(Family.SINGLE), st.sampled_from(["joint", "cross_step"]))
def test_a_budget_that_stock_order_meets_is_never_refused(graph, policy):
    peak = plan(graph, policy="in_order").simulate().peak_bytes
    if peak:
        assert plan(graph, policy=policy, byte_budget=peak).simulate().peak_bytes <= peak


def test_joint_is_never_slower_than_the_natural_place():
    for name in ("gpt2", "densenet121", "mobilenet_v3_large", "resnet50"):
        costs = network(name, batch=4)
        assert simulate("joint", costs).step_time <= simulate("side_stream", costs).step_time * (1 + 1e-9)


def crossing_costs():
    """Backward fills the device, the forward leaves room: weight gradients should wait for it."""
    busy, light = Demand(1.0, 0.0), Demand(0.5, 0.0)
    return Costs(
        tuple(
            LayerCost(f"l{i}", 2, 1, 1, 0.0, 1, 1, 1, f"b{i}", forward_demand=light, input_grad_demand=busy,
                      weight_grad_demand=light)
            for i in range(8)
        )
    )  # fmt: skip


def test_cross_step_delays_weight_gradients_into_the_next_forward_but_not_past_their_use():
    timeline = simulate("cross_step", crossing_costs())
    assert timeline.step_time < simulate("joint", crossing_costs()).step_time
    spans = {(s.task.kind, s.task.layer, s.task.step): s for s in timeline.spans}
    last_input_gradient = spans[Kind.X, 0, 0].end
    late = [layer for layer in range(8) if spans[Kind.W, layer, 0].start >= last_input_gradient]
    assert len(late) > 3
    for layer in range(8):
        assert spans[Kind.W, layer, 0].end <= spans[Kind.U, layer, 0].start
        assert spans[Kind.U, layer, 0].end <= spans[Kind.F, layer, 1].start


@pytest.mark.parametrize("policy", ["joint", "cross_step"])
def test_a_byte_budget_is_kept_or_refused_with_the_least_that_works(policy):
    costs = network("gpt2", batch=2)
    free = simulate(policy, costs)
    with pytest.raises(ArgumentError, match=r"byte_budget=1: give at least (\d+)") as error:
        simulate(policy, costs, byte_budget=1)
    least = int(str(error.value).split("at least ")[1].split(":")[0])
    assert least <= free.peak_bytes
    tight = simulate(policy, costs, byte_budget=least)
    assert tight.peak_bytes <= least
    assert tight.step_time >= free.step_time
