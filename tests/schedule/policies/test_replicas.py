"""Data-parallel policies: the effects of the barrier, the order and the link."""

import pytest

from gradweave.errors import ArgumentError, ScheduleError
from gradweave.schedule import Costs, Kind, LayerCost, Link, data_parallel, network, plan
from gradweave.schedule.networks import ARITHMETIC_ONLY

RESNET = network("resnet50", batch=32, hardware=ARITHMETIC_ONLY)


def resnet(ratio):
    """ResNet-50's shape with time by operations, F = X = W, and communication/compute = ratio."""
    layers = tuple(
        LayerCost(c.name, c.forward, c.forward, c.forward, parameter_bytes=c.parameter_bytes) for c in RESNET.layers
    )
    costs = Costs(layers)
    # Two replicas send each byte once.
    link = Link(costs.parameter_bytes / (ratio * costs.compute_seconds))
    return data_parallel(costs, replicas=2, link=link, steps=8)


def step_time(graph, policy, **options):
    return plan(graph, policy=policy, bucket_bytes=0, **options).simulate().step_time


@pytest.mark.parametrize(("ratio", "gain"), [(0.75, 1.09), (0.9, 1.25), (1.0, 1.27)])
def test_reverse_first_k_gains_on_a_fifo_link(ratio, gain):
    graph = resnet(ratio)
    stock = step_time(graph, "ddp")
    assert stock / step_time(graph, "reverse_first_k") == pytest.approx(gain, abs=0.02)
    assert stock / step_time(graph, "no_barrier") == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 0.59])
def test_it_stays_out_of_the_way_where_communication_is_cheap(ratio):
    graph = resnet(ratio)
    chosen = plan(graph, policy="reverse_first_k", bucket_bytes=0)
    assert chosen.options == {"bucket_bytes": 0, "k": 0}
    assert chosen.simulate().step_time == pytest.approx(step_time(graph, "ddp"), rel=1e-3)


@pytest.mark.parametrize("ratio", [0.3, 0.75, 1.0, 1.5])
def test_with_the_barrier_kept_reversal_gains_nothing(ratio):
    graph = resnet(ratio)
    stock = step_time(graph, "ddp")
    for k in (0, 10, 29, 46, 54):
        assert step_with_barrier(graph, k) >= stock * (1 - 1e-9)


def step_with_barrier(graph, k):
    """Reverse first-k with every update moved before the next forward."""
    from dataclasses import replace

    schedule = plan(graph, policy="reverse_first_k", k=k, bucket_bytes=0)
    rewritten, main = schedule.graph, schedule.lanes[0]
    order = sorted(
        main.tasks,
        key=lambda i: (
            rewritten.tasks[i].step,
            {Kind.F: 0, Kind.X: 1, Kind.W: 1, Kind.U: 2}[rewritten.tasks[i].kind],
            main.tasks.index(i),
        ),
    )
    return replace(schedule, lanes=(replace(main, tasks=tuple(order)), *schedule.lanes[1:])).simulate().step_time


def test_preemption_is_an_upper_bound_where_reversal_is_not_perfect():
    graph = resnet(1.0)
    stock = step_time(graph, "ddp")
    assert stock / step_time(graph, "priority") == pytest.approx(1.333, abs=0.02)
    assert step_time(graph, "priority") <= step_time(graph, "reverse_first_k")


def test_the_search_finds_about_the_best_k():
    graph = resnet(0.9)
    best = min(step_time(graph, "reverse_first_k", k=k) for k in range(55))
    assert step_time(graph, "reverse_first_k") <= best * 1.005


def test_order_of_the_gradients():
    graph = data_parallel(Costs.uniform(4), replicas=2, link=Link(1.0))
    schedule = plan(graph, policy="reverse_first_k", k=2, bucket_bytes=0)
    tasks = schedule.graph.tasks
    main = "".join(f"{tasks[i].kind}{tasks[i].layer} " for i in schedule.lanes[0].tasks)
    assert main == "F0 F1 F2 F3 W3 X3 W2 X2 X1 X0 W0 W1 U0 F0 U1 F1 U2 F2 U3 F3 "
    sent = [s.task.layer for s in schedule.simulate().spans if s.task.kind is Kind.C]
    assert sent == [3, 2, 0, 1]


def test_a_byte_budget_bounds_k():
    layers = (
        LayerCost("first", 1, 1, 1, input_bytes=100, output_bytes=100, parameter_bytes=3),
        *Costs.uniform(7).layers,
    )
    graph = data_parallel(Costs(layers), replicas=2, link=Link(0.6), steps=4)
    free = plan(graph, policy="reverse_first_k", bucket_bytes=0)
    assert free.options["k"] > 0
    peak = free.simulate().peak_bytes
    bounded = plan(graph, policy="reverse_first_k", bucket_bytes=0, byte_budget=peak - 1)
    assert bounded.options["k"] < free.options["k"]
    assert bounded.simulate().peak_bytes < peak
    with pytest.raises(ArgumentError, match=r"byte_budget=1: give at least \d+ bytes: no k holds less"):
        plan(graph, policy="reverse_first_k", byte_budget=1)
    with pytest.raises(ScheduleError, match="byte_budget=1: reverse_first_k holds"):
        plan(graph, policy="reverse_first_k", k=3, byte_budget=1)
    with pytest.raises(ArgumentError, match="k=9: give 0 to 8"):
        plan(graph, policy="reverse_first_k", k=9)


def test_buckets_trade_latency_for_overlap():
    costs = Costs.uniform(16)
    slow_start = data_parallel(costs, replicas=2, link=Link(4.0, latency=1.0))
    assert step_time(slow_start, "ddp") > plan(slow_start, policy="ddp", bucket_bytes=4).simulate().step_time
    plain = data_parallel(costs, replicas=2, link=Link(0.6))
    assert step_time(plain, "ddp") < plan(plain, policy="ddp", bucket_bytes=100).simulate().step_time
