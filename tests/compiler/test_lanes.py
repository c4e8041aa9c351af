"""Running regions: streams in the order of the plan, memory freed in time, and a clock that sees all of it."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

from compiler.models import batches, make
from compiler.passes.traced import TASKS, call_of, placed, step_of_two, trace
from compiler.planned import POLICIES, events_of, layer_names, make_chain, random_costs, train
from executed_is_planned import check_executed
from gradweave.compiler.lanes import Carried, Clock, RegionRunner, _Streams, timeline_of
from gradweave.compiler.passes.regions import cut
from gradweave.compiler.passes.slots import slot_operations
from played_streams import Races, as_if_on_a_gpu

ORDERS = {
    "one lane": "F0 F1 W1 X1 W0 X0 U0 U1",
    "weight gradients beside": "F0 F1 X1 W1b X0 W0b U0 U1",
    "upper region beside": "F0 F1 X1 W1b U1b W0 X0 U0",
    "updates in the next step": "F0 ~U1b F1 W1 X1 W0 X0 U0b",
    "weight gradients in the next step": "F0 ~W1b ~U1b F1 X1 W0b X0 U0b",
}


def runner_of(order, *, by_task=False, lower=lambda graph, _: graph):
    graph, (upper, lower_weight, _) = trace(step_of_two, 3)
    call = call_of(2, order)
    slotted = slot_operations(graph.graph, placed(graph, TASKS), call, lasting=[upper, lower_weight])
    return RegionRunner(cut(graph, slotted, by_task=by_task), lower, None)


def weights():
    return tuple(nn.Parameter(torch.full((4,), value), requires_grad=False) for value in (0.3, 0.2))


def by_hand(steps):
    upper, lower = weights()
    return (
        [float(step_of_two(upper, lower, torch.full((4,), 0.1 * number))[0][0]) for number in range(steps)],
        upper,
        lower,
    )


@pytest.mark.parametrize("by_task", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_the_same_training(order, by_task):
    run = runner_of(ORDERS[order], by_task=by_task)
    upper, lower = weights()
    losses = [float(run(upper, lower, torch.full((4,), 0.1 * number))[0][0]) for number in range(4)]
    run.flush()
    expected, *final = by_hand(4)
    assert losses == expected
    assert torch.equal(upper, final[0])
    assert torch.equal(lower, final[1])


@pytest.mark.parametrize("order", ORDERS)
def test_streams_wait_for_each_other_and_the_step_ends_behind_all(order, monkeypatch):
    """With streams that are played on the CPU."""
    upper, lower = weights()
    races = Races(monkeypatch)
    run = runner_of(ORDERS[order])
    with races:
        for number in range(3):
            x = torch.full((4,), 0.1 * number)
            with as_if_on_a_gpu():
                (loss,) = run(upper, lower, x)
            loss + upper + lower
            del x, loss
        with as_if_on_a_gpu():
            run.flush()
        upper + lower
    assert races.found == []
    assert len(races.streams) == (2 if "b" in ORDERS[order] else 1)
    assert all(races.streams.values())


@pytest.mark.parametrize("order", ["weight gradients beside", "updates in the next step"])
def test_a_wait_that_is_forgotten_is_a_race(order, monkeypatch):
    upper, lower = weights()
    races = Races(monkeypatch)
    run = runner_of(ORDERS[order])
    with races, as_if_on_a_gpu():
        monkeypatch.setattr("gradweave.compiler.lanes._Streams.leave", lambda *_, **__: None)
        for number in range(3):
            run(upper, lower, torch.full((4,), 0.1 * number))
    assert races.found


def test_what_a_failing_step_has_not_run_of_the_one_before_is_run():
    failing = []

    def lower(graph, _):
        def run(*inputs):
            if failing and any(node.name == "mul_1" for node in graph.graph.nodes if node.op == "call_function"):
                raise ValueError("no forward")
            return graph(*inputs)

        return run

    run = runner_of("F0 ~U1 F1 W1 X1 W0 X0 U0", lower=lower)
    upper, lower_weight = weights()
    run(upper, lower_weight, torch.ones(4))
    failing.append(True)
    with pytest.raises(ValueError, match="no forward"):
        run(upper, lower_weight, torch.ones(4))
    expected = weights()
    step_of_two(*expected, torch.ones(4))
    assert torch.equal(upper, expected[0])
    assert torch.equal(lower_weight, expected[1])
    assert run.carried.values is None


def test_values_are_freed_with_their_last_use():
    alive = []

    def lower(graph, _):
        def run(*inputs):
            gc.collect()
            alive.append(sum(made() is not None for made in seen))
            made = graph(*inputs)
            seen.extend(weakref.ref(value) for value in made)
            return made

        return run

    seen = []
    run = runner_of("F0 F1 W1 X1 U1 W0 X0 U0", by_task=True, lower=lower)
    run(torch.full((4,), 0.3), torch.full((4,), 0.2), torch.ones(4))
    # F0 y | F1 loss | W1 of_upper (y dies) | X1 below | U1 (of_upper dies) | W0 of_lower | X0 | U0; loss is returned
    assert alive == [0, 1, 2, 2, 3, 2, 2, 2]


def test_two_runners_of_a_step_share_what_is_left():
    carried = Carried()
    graph, (upper_node, lower_node, _) = trace(step_of_two, 3)
    call = call_of(2, ORDERS["updates in the next step"])
    slotted = slot_operations(graph.graph, placed(graph, TASKS), call, lasting=[upper_node, lower_node])
    whole, by_task = (
        RegionRunner(cut(graph, slotted, by_task=each), lambda g, _: g, None, carried) for each in (False, True)
    )
    upper, lower = weights()
    losses = [
        float(run(upper, lower, torch.full((4,), 0.1 * number))[0][0])
        for number, run in enumerate([whole, by_task, whole, by_task])
    ]
    whole.flush()
    expected, *final = by_hand(4)
    assert losses == expected
    assert torch.equal(upper, final[0])


def test_a_clock_sees_every_task():
    run = runner_of(ORDERS["weight gradients beside"], by_task=True)
    clock = Clock(torch.device("cpu"))
    run(torch.ones(4), torch.ones(4), torch.ones(4), clock=clock)
    spans = timeline_of(clock).spans
    assert " ".join(f"{span.task.kind}{span.task.layer}" for span in spans) == "F0 F1 X1 W1 X0 W0 U0 U1"
    assert [span.lane for span in spans if span.task.kind == "W"] == ["side", "side"]
    assert all(one.end <= other.start for one, other in pairwise(spans))


def test_regions_are_spans_that_name_their_tasks():
    run = runner_of(ORDERS["weight gradients beside"])
    clock = Clock(torch.device("cpu"))
    run(torch.ones(4), torch.ones(4), torch.ones(4), clock=clock)
    labels = [span.task.label for span in timeline_of(clock).spans]
    assert labels[0] == "F(layer 0-1, micro-batch 0, step 0 to F1, of F)"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning", r"ignore:\s*Online softmax:UserWarning")
@pytest.mark.parametrize("lower", ["replay", "inductor"])
@pytest.mark.parametrize("policy", POLICIES)
def test_lanes_of_a_gpu(policy, lower):
    blocks = ("residual", "norm", "again")
    costs = random_costs(layer_names(make_chain(blocks, "cuda"), "cuda"), 5)
    losses, step = train(make_chain(blocks, "cuda"), 8, device="cuda", policy=policy, costs=costs, lower=lower)
    expected, stock = train(make_chain(blocks, "cuda"), 8, device="cuda")
    if lower == "replay":
        assert torch.equal(losses, expected)
        pairs = zip(step.model.parameters(), stock.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        given = ((x.cuda(), y.cuda()) for x, y in batches(5))
        check_executed(step.schedule, events_of(step, given))
    else:
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("policy", ["side_stream", "forward_fusion", "cross_step", "side_region"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_lane_that_is_slow_is_waited_for(policy, slow, monkeypatch):
    names = layer_names(make("mlp").cuda(), "cuda")
    expected, stock = train(make("mlp").cuda(), 8, device="cuda")
    real = _Streams.enter

    def enter_slowly(self, region):
        context = real(self, region)
        if region.lane == slow:
            with torch.cuda.stream(self._stream_of(region.lane)):
                torch.cuda._sleep(2_000_000)
        return context

    monkeypatch.setattr(_Streams, "enter", enter_slowly)
    losses, step = train(make("mlp").cuda(), 8, device="cuda", policy=policy, costs=random_costs(names, 8))
    assert torch.equal(losses, expected)
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), stock.model.parameters(), strict=True))
