"""Which optimizers count as having a two-phase step, and what the phases promise."""

import pytest
import torch
from torch import nn

from gradweave._runtime.two_phase_step import two_phase_step
from gradweave.optim import Eva, EvaF, EvaS


class Halving(torch.optim.Optimizer):
    """An optimizer that knows nothing of gradweave, and has the method of the protocol."""

    def __init__(self, params):
        super().__init__(params, {})

    def prepare_step(self):
        return lambda params: [p.data.div_(2) for p in params]

    def step(self):
        self.prepare_step()([p for group in self.param_groups for p in group["params"]])


class Inheriting(Halving):
    pass


class Clipping(Halving):
    def step(self):
        super().step()


def test_torchs_optimizers_have_none():
    assert two_phase_step(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)) is None


@pytest.mark.parametrize("cls", [Halving, Inheriting])
def test_any_class_with_the_method_has_one(cls):
    optimizer = cls(nn.Linear(2, 2).parameters())
    assert two_phase_step(optimizer) is optimizer


def test_a_step_that_is_overridden_is_not_left_out():
    assert two_phase_step(Clipping(nn.Linear(2, 2).parameters())) is None


@pytest.mark.parametrize("cls", [Eva, EvaF, EvaS])
@pytest.mark.parametrize("order", [1, -1])
def test_committing_in_parts_is_the_step(cls, order):
    """In any order, with the gradients and hyperparameters of the time at which the step was prepared."""
    ends = []
    for whole in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        optimizer = cls(model, lr=torch.tensor(0.1))
        for _ in range(3):
            model(torch.randn(6, 4)).square().sum().backward()
            before = [p.detach().clone() for p in model.parameters()]
            if whole:
                optimizer.step()
            else:
                commit = two_phase_step(optimizer).prepare_step()
                assert all(map(torch.equal, model.parameters(), before))
                optimizer.param_groups[0]["lr"].mul_(7)
            optimizer.zero_grad()
            for p in [] if whole else list(model.parameters())[::order]:
                with torch.no_grad():
                    commit([p])
            if not whole:
                optimizer.param_groups[0]["lr"].fill_(0.1)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *ends))
