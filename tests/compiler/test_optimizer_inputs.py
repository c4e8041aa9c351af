"""Optimizers of users' own: tensor code is traced, everything else runs eagerly."""

from fractions import Fraction

import pytest
import torch
from torch import optim

from compiler.models import (
    OPTIMIZERS,
    assert_identical,
    counting,
    train,
)
from gradweave.compiler import program


class Replaces(optim.Optimizer):
    """Puts new tensors into its state in the place of the old ones."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "decay": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.get("mean", torch.zeros_like(p))
                state["mean"] = group["decay"] * mean + p.grad
                p.sub_(state["mean"], alpha=group["lr"])


class CountsInAttribute(Replaces):
    """Keeps a count outside of its state."""

    def step(self, closure=None):
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure)


class TensorAttribute(Replaces):
    """Keeps a tensor outside of its state."""

    def __init__(self, params):
        super().__init__(params)
        self.count = torch.zeros(())

    def step(self, closure=None):
        self.count.add_(1)
        return super().step(closure)


class Nested(optim.Optimizer):
    """Keeps tensors in a list in its state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p].setdefault("held", [torch.zeros_like(p)])
                p.sub_(held[0].mul_(0.9).add_(p.grad), alpha=group["lr"])


class StateOfNobody(Replaces):
    """Keeps state under a name."""

    def step(self, closure=None):
        self.state["all"].setdefault("count", torch.zeros(())).add_(1)
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [CountsInAttribute, TensorAttribute, Nested, StateOfNobody])
def test_optimizers_that_keep_something_elsewhere_run_eagerly(optimizer, warned):
    made, expected = (train("mlp", lower, optimizer) for lower in ("replay", None))
    assert torch.equal(made[2], expected[2])
    for mine, theirs in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert str(getattr(made[1], "count", None)) == str(getattr(expected[1], "count", None))
    (message,) = warned()
    assert "runs eagerly" in message
    assert "cannot be traced" in message
    assert "use an optimizer" in message


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_a_custom_optimizer_of_tensor_code(lower):
    made, expected = train("small", lower, Replaces), train("small", None, Replaces)
    torch.testing.assert_close(made[2], expected[2], rtol=1e-6, atol=0)
    if lower == "replay":
        assert_identical(made, expected)


def test_hyperparameters_change_without_a_new_graph(caplog):
    def each(number, model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + number)
            group["momentum"] = 0.5 + 0.05 * number
            group["weight_decay"] = 0.01 * number if number else 0.02

    with caplog.at_level("INFO", logger="gradweave"):
        made = train("small", "inductor", OPTIMIZERS["sgd, everything"], each=each)
    torch.testing.assert_close(made[2], train("small", None, OPTIMIZERS["sgd, everything"], each=each)[2])
    assert sum("ready after" in record.message for record in caplog.records) <= 1


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_state_of_another_kind_makes_a_new_graph(lower):
    def each(number, model, optimizer):
        if number == 3:
            for entry in optimizer.state.values():
                entry["exp_avg_sq"] = entry["exp_avg_sq"].double()

    made, expected = train("small", lower, each=each), train("small", each=each)
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)


def test_numpy_rates_need_one_graph(monkeypatch):
    numpy = pytest.importorskip("numpy")
    made = []
    monkeypatch.setattr(program, "trace_step", counting(program.trace_step, made))

    def each(number, model, optimizer):
        optimizer.param_groups[0]["lr"] = numpy.float64(0.01 / (1 + number))

    assert_identical(train("mlp", "replay", each=each), train("mlp", each=each))
    assert len(made) == 1


def changed_in_a_list(number, model, optimizer):
    optimizer.param_groups[0]["betas"][0] = 0.9 - 0.1 * number


def changed_key(number, model, optimizer):
    if number == 3:
        optimizer.param_groups[0]["trust"] = 0.1


class Trusting(optim.SGD):
    """Reads a key that may not be there."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(group.get("trust", 1.0))
        return super().step(closure)


@pytest.mark.parametrize(
    ("make_optimizer", "each"),
    [
        (lambda p: optim.NAdam(p, lr=1e-2, betas=[0.9, 0.99]), changed_in_a_list),
        (lambda p: Trusting(p, lr=0.1), changed_key),
    ],
    ids=["list", "new key"],
)
def test_hyperparameters_in_lists_and_under_new_keys(make_optimizer, each):
    made, expected = (train("mlp", lower, make_optimizer, each=each) for lower in ("replay", None))
    assert torch.equal(made[2], expected[2])
    for mine, theirs in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)


RATES = {
    "float32": torch.tensor,
    "float64": lambda x: torch.tensor(x, dtype=torch.float64),
    "1": lambda x: torch.tensor([x]),
}


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.AdamW, optim.NAdam, optim.Adamax])
@pytest.mark.parametrize("kind", RATES)
def test_rates_that_are_tensors(optimizer, kind, warned):
    """They compute in a precision of their own, and may be changed in place."""

    def run(lower):
        rate = RATES[kind](0.01)

        def each(number, model, optimizer):
            rate.fill_(0.01 / (1 + number))

        return train("linear", lower, lambda p: optimizer(p, lr=rate), each=each)

    assert_identical(run("replay"), run(None))
    assert not warned()


@pytest.mark.parametrize("optimizer", [optim.AdamW, optim.NAdam])
def test_numbers_that_have_a_precision_of_their_own_are_left_to_the_eager_step(optimizer, warned):
    numpy = pytest.importorskip("numpy")

    def each(number, model, optimizer):
        kind = (float, float, numpy.float64, numpy.float32, numpy.float16, Fraction)[number]
        optimizer.param_groups[0]["lr"] = kind(0.01)

    assert_identical(*(train("linear", lower, optimizer, each=each) for lower in ("replay", None)))
    (message,) = warned()
    assert "its lr is a numpy.float32" in message
    assert "give a float" in message
