import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradweave import plan
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.queued_calls import QueuedCalls
from gradweave._runtime.split_calls.task import Task
from gradweave.errors import UnsupportedError
from gradweave.reordering.executor import PlannedLane, crossing_in, plan_within_budget, turns_of
from gradweave.schedule.builders import single
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.tasks import Demand, Kind


class Noting:
    """A lane that runs tasks at once, and notes them."""

    stream = None

    def __init__(self):
        self.started = []
        self.waited = []

    def start(self, task):
        self.started.append(task.layer)
        task.compute()

    def wait(self, task):
        assert task.layer in self.started
        self.waited.append(task.layer)


def gradients(model, x, lane=None, budget=None):
    model.zero_grad()
    if lane is None:
        model(x).square().sum().backward()
    else:
        weights = {number: (layer.weight, layer.bias) for number, layer in enumerate(model)}
        queue = WeightGradientQueue(lane, budget)
        with QueuedCalls(queue, weights):
            loss = model(x).square().sum()
        loss.backward()
        assert queue.held_bytes == 0
    return [p.grad.clone() for p in model.parameters()]


@given(st.data())
def test_any_plan_gives_the_stock_gradients_in_its_order(data):
    count = data.draw(st.integers(1, 5))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    x = torch.randn(3, 4)
    chosen = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    turns = tuple((layer, data.draw(st.integers(0, layer) | st.none())) for layer in chosen)
    budget = data.draw(st.none() | st.integers(0, 200))
    lane = Noting()
    planned = PlannedLane(lane, turns)
    expected = gradients(model, x)
    for _ in range(2):
        lane.started.clear()
        made = gradients(model, x, planned, budget)
        assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
        in_order = iter(chosen)
        assert all(layer in in_order for layer in lane.started)
        assert budget is not None or lane.started == chosen
        assert sorted(lane.waited[-len(lane.started) :]) == sorted(lane.started)


def cost(name, seconds):
    half = Demand(0.5, 0.5)
    return LayerCost(name, seconds, seconds, seconds, 0.1, 1, 1, 1, "", half, half, half, half)


@pytest.mark.parametrize("policy", ["side_stream", "joint"])
def test_turns_of_a_schedule(policy):
    costs = Costs(tuple(cost(f"layer{i}", 1.0 + i) for i in range(4)))
    schedule = plan(single(costs), policy=policy)
    turns = turns_of(schedule, {1: 0, 2: 1, 3: 2})
    assert {layer for layer, _ in turns} <= {0, 1, 2}
    if policy == "side_stream":
        assert turns == ((2, None), (1, None), (0, None))
    assert all(after is None or after >= layer for layer, after in turns) or policy == "joint"


def test_what_is_put_off_into_the_next_forward_begins_after_all_input_gradients():
    idle, busy = Demand(0.1, 0.1), Demand(1.0, 1.0)
    layers = [LayerCost(f"{i}", 2.0, 1.0, 1.0, 0.0, 1, 1, 1, "", idle, busy, Demand(0.9, 0.9), idle) for i in range(6)]
    schedule = plan(single(Costs(tuple(layers))), policy="cross_step")
    numbers = {index: index - 1 for index in range(1, 6)}
    crossing = crossing_in(schedule, numbers)
    assert crossing
    assert 0 not in crossing
    turns = turns_of(schedule, numbers)
    assert all(after == 0 for layer, after in turns if layer in crossing)
    for policy in ("side_stream", "joint"):
        assert not crossing_in(plan(single(Costs(tuple(layers))), policy=policy), numbers)


def costs_of(sizes):
    """Layers of which the lower half has long input gradients that leave room for all weight gradients."""
    idle, busy = Demand(0.1, 0.1), Demand(1.0, 1.0)
    layers = []
    for number, size in enumerate(sizes):
        input_grad, demand = (3.0, idle) if number < len(sizes) / 2 else (1.0, busy)
        cost = LayerCost(
            f"{number}", 2.0, input_grad, 1.0, 0.0, size, size, 1, "", idle, demand, Demand(0.9, 0.9), idle
        )
        layers.append(cost)
    return Costs(tuple(layers))


def most_planned_bytes(schedule, sizes):
    """The most that unfinished weight gradients of the first step hold at once, in a simulated timeline."""
    spans = {(span.task.kind, span.task.layer, span.task.step): span for span in schedule.simulate().spans}
    lives = [
        (min(spans[Kind.X, n, 0].start, spans[Kind.W, n, 0].start), spans[Kind.W, n, 0].end, size)
        for n, size in enumerate(sizes)
    ]
    return max(sum(size for begin, end, size in lives if begin <= moment < end) for moment, _, _ in lives)


@pytest.mark.parametrize("policy", ["joint", "cross_step"])
def test_unlimited_plans_put_weight_gradients_off(policy):
    sizes = [8] * 6
    schedule = plan_within_budget(costs_of(sizes), policy, None)
    assert schedule == plan(single(costs_of(sizes)), policy=policy)
    assert most_planned_bytes(schedule, sizes) > 16


@pytest.mark.parametrize("policy", ["joint", "cross_step"])
@given(sizes=st.lists(st.integers(0, 64), min_size=1, max_size=6), budget=st.integers(0, 200))
def test_planned_bytes_are_within_the_budget(policy, sizes, budget):
    schedule = plan_within_budget(costs_of(sizes), policy, budget)
    held = [2 * size if policy == "cross_step" else size for size in sizes]
    in_line = [number for number, size in enumerate(held) if size > budget]
    assert most_planned_bytes(schedule, [0 if n in in_line else size for n, size in enumerate(held)]) <= budget
    turns = turns_of(schedule, {number: number for number in range(len(sizes))})
    assert not {layer for layer, _ in turns} & {*in_line}


def test_a_plan_within_the_budget_is_executed_as_planned():
    """The queue, which bounds bytes at run time too, takes no weight gradient out of its turn."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    x = torch.randn(3, 4)
    size = 3 * 4 * 4
    schedule = plan_within_budget(costs_of([size] * 6), "joint", 4 * size)
    turns = turns_of(schedule, {number: number for number in range(6)})
    assert any(after is not None and after < layer for layer, after in turns)
    lane = Noting()
    made = gradients(model, x, PlannedLane(lane, turns), 4 * size)
    assert lane.started == [layer for layer, _ in turns]
    assert all(torch.equal(a, b) for a, b in zip(made, gradients(model, x), strict=True))


def test_a_schedule_for_several_devices_is_refused():
    costs = Costs.uniform(2)
    with pytest.raises(UnsupportedError, match="schedule 'in_order': it is not one of two streams"):
        turns_of(plan(single(costs), policy="in_order"), {0: 0})


def test_layers_keep_their_numbers_where_some_are_frozen():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[1].requires_grad_(False)
    lane = Noting()
    queue = WeightGradientQueue(PlannedLane(lane, ((3, None), (2, 0))))
    with QueuedCalls(queue, {number: (layer.weight, layer.bias) for number, layer in enumerate(model)}):
        loss = model(torch.randn(3, 4)).sum()
    loss.backward()
    assert lane.started == [3, 2]


def test_a_backward_that_fails_takes_its_tasks_along():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("on purpose")

    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    queue = WeightGradientQueue(PlannedLane(Noting(), ((1, None), (0, None))))
    for fails in (True, False):
        with QueuedCalls(queue, {number: (layer.weight, layer.bias) for number, layer in enumerate(layers)}):
            x = layers[0](torch.ones(2, 4))
            loss = layers[1](Fails.apply(x) if fails else x).sum()
        if fails:
            with pytest.raises(ValueError, match="on purpose"):
                loss.backward()
        else:
            loss.backward()
        del loss, x
    gc.collect()
    assert queue.held_bytes == 0
    assert not [one for one in gc.get_objects() if type(one) is Task]
