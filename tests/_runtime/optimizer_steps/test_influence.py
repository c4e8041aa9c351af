"""Which updates depend on which gradients is followed through the operations of a step."""

import pytest
import torch
from torch import nn, optim

from gradweave._runtime.optimizer_steps import influence
from gradweave._runtime.optimizer_steps.influence import find_influence


def params(size=4):
    return [nn.Parameter(torch.ones(size, size)), nn.Parameter(torch.ones(size))]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: optim.AdamW(p, foreach=True),
        lambda p: optim.AdamW(p, fused=True),
        lambda p: optim.Adagrad(p),
    ],
)
def test_optimizers_of_torch_couple_nothing(make):
    assert find_influence(make(params())) == ""


class Coupled(optim.SGD):
    """Scales every gradient by the norm over all of them."""

    def step(self, closure=None):
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad / norm)


class Noisy(optim.SGD):
    """Adds noise to every parameter."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn_like(p))


class Reads(optim.SGD):
    """Reads a value in Python."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad * float(p.grad.sum().item() > 0))


def test_a_norm_over_all_gradients_couples_them():
    assert "couples its parameters" in find_influence(Coupled(params(), lr=0.1))


def test_random_numbers_are_named():
    assert "draws random numbers" in find_influence(Noisy(params(), lr=0.1))


def test_a_step_that_reads_values_is_tried_in_memory_unless_it_is_too_large(monkeypatch):
    assert find_influence(Reads(params(), lr=0.1)) == ""
    monkeypatch.setattr(influence, "_LARGEST_TRIED", 8)
    assert "asks for values of tensors" in find_influence(Reads(params(), lr=0.1))


def test_the_optimizer_itself_is_left_alone():
    given = params()
    optimizer = optim.AdamW(given)
    find_influence(optimizer)
    assert not optimizer.state
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for p in given)
