"""Optimizers of users' own: tensor code is traced, everything else runs eagerly."""

import pytest
import torch
from torch import optim

import gradweave
from compiler.models import assert_identical, train


class CountsInGroup(optim.SGD):
    """Keeps a count where it cannot be traced."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class CountsAsInt(optim.Optimizer):
    """Keeps a Python number in its state."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] / state["count"])


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


@pytest.mark.parametrize(
    "optimizer", [CountsInGroup, CountsAsInt, CountsInAttribute, TensorAttribute, Nested, StateOfNobody]
)
def test_optimizers_that_keep_something_elsewhere_run_eagerly(optimizer, warned):
    make_it = (lambda p: optimizer(p, lr=0.1)) if optimizer is CountsInGroup else optimizer
    made, expected = (train("mlp", lower, make_it) for lower in ("replay", None))
    assert torch.equal(made[2], expected[2])
    for mine, theirs in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert made[1].param_groups[0].get("count") == expected[1].param_groups[0].get("count")
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


class TrustRatio(torch.optim.Optimizer):
    """Changes a scalar of its own in place, by something that differs between parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                state["step"].add_(1)
                rate = group["lr"] / state["step"]
                rate.mul_(p.norm() + 0.1)
                p.add_(-p.grad * rate)


def test_a_scalar_that_is_changed_in_place_is_each_parameters_own():
    def train(lower):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        step = gradweave.compile(model, lambda m, x: m(x).square().mean(), TrustRatio(model.parameters()), lower=lower)
        return torch.stack([step(torch.linspace(0, 1, 24).view(4, 6)) for _ in range(6)])

    torch.testing.assert_close(train("inductor"), train("replay"), rtol=1e-5, atol=1e-7)
