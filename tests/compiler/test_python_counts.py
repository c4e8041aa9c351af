"""Numbers that an optimizer keeps in Python: inputs of one graph, and current after each step."""

import math
from math import sqrt as sqrt_of_python

import pytest
import torch
from torch import optim

import gradweave
from compiler.models import batches, counting, loss_fn, make, train
from gradweave.compiler import program
from gradweave.compiler.python_counts import serves_other_steps


class CountsInGroup(optim.SGD):
    """Counts in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                p.grad.div_(group["count"])
        return super().step(closure)


class CountsInState(optim.Optimizer):
    """AdamW as many write it: a count for each parameter, and Python's arithmetic."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                state["step"] += 1
                state["mean"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["square"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                below = state["square"].sqrt() / self.root_of(1 - beta2 ** state["step"])
                p.addcdiv_(state["mean"], below.add_(group["eps"]), value=-group["lr"] / (1 - beta1 ** state["step"]))

    def root_of(self, number):
        return math.sqrt(number)


class ScheduleFree(optim.Optimizer):
    """Schedule-free SGD as its authors write it: a count, a sum and a maximum in the groups."""

    def __init__(self, params, lr=0.1, momentum=0.9, warmup=0, power=0.0):
        numbers = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "scheduled_lr": 0.0}
        super().__init__(params, {"lr": lr, "momentum": momentum, "warmup": warmup, "power": power, **numbers})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            k = group["k"]
            lr = group["scheduled_lr"] = group["lr"] * ((k + 1) / group["warmup"] if k < group["warmup"] else 1.0)
            lr_max = group["lr_max"] = max(lr, group["lr_max"])
            weight = ((k + 1) ** group["power"]) * lr_max**2.0
            weight_sum = group["weight_sum"] = group["weight_sum"] + weight
            try:
                share = weight / weight_sum
            except ZeroDivisionError:
                share = 0
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = torch.clone(p)
                p.lerp_(end=state["z"], weight=share)
                p.add_(p.grad, alpha=lr * (group["momentum"] * (1 - share) - 1))
                state["z"].sub_(p.grad, alpha=lr)
            group["k"] = k + 1


class EveryThird(optim.SGD):
    """Does something else in every third step."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            if group["count"] % 3 == 0:
                for p in group["params"]:
                    p.grad.mul_(0.5)
        return super().step(closure)


OPTIMIZERS = {
    "count in a group": (lambda p: CountsInGroup(p, lr=0.1), 1),
    "counts in the state": (CountsInState, 1),
    "schedule-free": (ScheduleFree, 1),
    "schedule-free, with a warm-up": (lambda p: ScheduleFree(p, warmup=4, power=0.5), 2),
    "every third": (lambda p: EveryThird(p, lr=0.1), 2),
}
"""Optimizers, and how many graphs they need."""


def numbers_of(optimizer):
    """All Python numbers in groups and state, and their types."""
    holders = [*optimizer.param_groups, *optimizer.state.values()]
    return [(key, type(x), x) for each in holders for key, x in each.items() if isinstance(x, (int, float))]


def assert_same(made, expected):
    assert torch.equal(made[2], expected[2])
    for mine, theirs in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert numbers_of(made[1]) == numbers_of(expected[1])


@pytest.fixture
def graphs(monkeypatch):
    made = []
    monkeypatch.setattr(program, "trace_step", counting(program.trace_step, made))
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_replay_is_the_eager_step_bit_for_bit_and_counts_are_current(name, graphs, warned):
    make_optimizer, needed = OPTIMIZERS[name]
    made, expected = (train("mlp", lower, make_optimizer, steps=9) for lower in ("replay", None))
    assert_same(made, expected)
    assert len(graphs) == needed
    assert not warned()


@pytest.mark.parametrize("name", ["counts in the state", "schedule-free, with a warm-up"])
def test_inductor_computes_counts_in_double_precision(name, graphs, warned):
    make_optimizer, needed = OPTIMIZERS[name]
    made, expected = (train("linear", lower, make_optimizer, steps=9) for lower in ("inductor", None))
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)
    assert numbers_of(made[1]) == numbers_of(expected[1])
    assert len(graphs) == needed
    assert not warned()


def test_counts_that_others_change_are_those_of_the_next_step(graphs):
    def each(number, model, optimizer):
        if number == 3:
            optimizer.param_groups[0]["k"] = 20
        if number == 5:
            state = optimizer.state_dict()
            state["param_groups"][0].update(k=2, weight_sum=0.01)
            optimizer.load_state_dict(state)

    make_optimizer = OPTIMIZERS["schedule-free"][0]
    assert_same(*(train("linear", lower, make_optimizer, steps=8, each=each) for lower in ("replay", None)))


def test_counts_of_parameters_that_differ_from_some_step_on(graphs):
    def each(number, model, optimizer):
        if number == 4:
            optimizer.state[model.bias]["step"] = 100

    made, expected = (train("linear", lower, CountsInState, steps=8, each=each) for lower in ("replay", None))
    assert_same(made, expected)
    assert {state["step"] for state in made[1].state.values()} == {8, 104}
    assert len(graphs) == 2


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_a_division_by_zero_that_the_optimizer_catches(lower):
    """No rate yet: the sum of weights is zero."""

    def each(number, model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.0 if number < 4 else 0.1

    made, expected = (train("linear", how, ScheduleFree, steps=8, each=each) for how in (lower, None))
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5 if lower == "inductor" else 0, atol=0)
    assert numbers_of(made[1]) == numbers_of(expected[1])


def test_micro_batches_and_recorded_steps_count_as_eager_ones(graphs):
    model = make("linear")
    optimizer = CountsInGroup(model.parameters(), lr=0.1)
    step = gradweave.compile(model, loss_fn, optimizer, lower="replay")
    data = list(batches(2))
    for number in range(1, 6):
        with step.no_update():
            step(*data[0])
        assert optimizer.param_groups[0].get("count", 0) == number - 1
        step(*data[1])
        assert optimizer.param_groups[0]["count"] == number
    assert len(graphs) <= 4  # of updates and of sums, with and without gradients that are there
    step.record(lambda kind, layer: torch.no_grad())
    step(*data[0])
    assert optimizer.param_groups[0]["count"] == 6


class AsOftenAsCounted(optim.SGD):
    """Needs the value of its count."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for _ in range(group["count"]):
                for p in group["params"]:
                    p.grad.mul_(0.9)
        return super().step(closure)


class WithARootOfItsOwn(CountsInState):
    """Has taken ``sqrt`` out of ``math``, where it does not see symbols."""

    def root_of(self, number):
        return sqrt_of_python(number)


class NormInGroup(optim.SGD):
    """Keeps the value of a tensor in Python."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["norm"] = sum(p.grad.sum().item() for p in group["params"])
        return super().step(closure)


@pytest.mark.parametrize(
    ("make_optimizer", "reason"),
    [
        (lambda p: AsOftenAsCounted(p, lr=0.1), "it needs the value of 'count'"),
        (WithARootOfItsOwn, "the value of a count"),
        (lambda p: NormInGroup(p, lr=0.1), "depends on the values of tensors"),
    ],
    ids=["as often", "root", "norm"],
)
def test_what_needs_the_value_of_a_number_runs_eagerly(make_optimizer, reason, warned, graphs):
    made, expected = (train("linear", lower, make_optimizer, steps=8) for lower in ("replay", None))
    assert_same(made, expected)
    (message,) = warned()
    assert reason in message
    assert len(graphs) == 2, "a try after 1 step and one after 2 more"


def test_a_scaler_that_may_skip_an_update_and_the_count_with_it(warned):
    model = make("linear")
    optimizer = CountsInGroup(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = gradweave.compile(model, loss_fn, optimizer, lower="replay", scaler=scaler)
    for number, (x, y) in enumerate(batches(4), start=1):
        step(x, y)
        assert optimizer.param_groups[0]["count"] == number
    assert "in Python" in step.eager_reason
    assert len(warned()) == 1


def test_several_groups_each_have_their_count():
    def groups(params):
        weight, bias = params
        return CountsInGroup([{"params": [weight]}, {"params": [bias], "lr": 0.3, "count": 7}], lr=0.1)

    assert_same(*(train("linear", lower, groups, steps=6) for lower in ("replay", None)))


def test_a_graph_serves_other_steps_before_or_after_it():
    def one_more(numbers):
        return [numbers[0], numbers[1] + 1]

    assert serves_other_steps(lambda numbers: numbers[1] > 5, one_more, [0.1, 6])
    assert serves_other_steps(lambda numbers: numbers[1] < 5, one_more, [0.1, 4])
    assert serves_other_steps(lambda numbers: numbers[1] % 3 == 0, one_more, [0.1, 6])
    assert not serves_other_steps(lambda numbers: numbers[1] == 6, one_more, [0.1, 6])


def test_functions_of_math_are_pythons_again():
    before = math.sqrt, math.pow, torch.SymFloat.__truediv__
    train("linear", "replay", CountsInState, steps=3)
    assert (math.sqrt, math.pow, torch.SymFloat.__truediv__) == before
