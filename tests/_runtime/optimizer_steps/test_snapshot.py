"""Settings that change after step() are for the next step."""

import itertools

import pytest
import torch
from torch import optim

from _runtime.deferred.comparison import same, train


class Scaled(optim.Optimizer):
    """Reads numbers from an attribute, from its class and from a list in its group."""

    of_all = 1.0

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "factors": [1.0, 1.0]})
        self.scale = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.scale * self.of_all * group["factors"][0])


@pytest.mark.parametrize("where", ["attribute", "class", "list"])
def test_numbers_that_change_after_step_are_for_the_next(where, monkeypatch):
    monkeypatch.setattr(Scaled, "of_all", 1.0)

    def change(i, model, optimizer, x):
        if where == "attribute":
            optimizer.scale = 1 / (2 + i)
        elif where == "class":
            Scaled.of_all = 1.0 if i == 7 else 1 / (2 + i)
        else:
            optimizer.param_groups[0]["factors"][0] = 1 / (2 + i)

    same(change, make=lambda model: Scaled(model.parameters()))


def test_a_group_that_gets_what_cannot_be_copied_is_stepped_in_stock_order():
    def add(i, model, optimizer, x):
        if i == 3:
            optimizer.param_groups[0]["rates"] = (0.01 / k for k in itertools.count(1))
        if i >= 3:
            optimizer.param_groups[0]["lr"] = next(optimizer.param_groups[0]["rates"])

    models = [train(mode, add)[0] for mode in (None, "forward")]
    for p, q in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_an_object_in_a_group_that_changes_after_step_is_for_the_next():
    class Scale:
        value = 0.5

    class Scaled(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "scale": None})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=group["lr"] * (group["scale"].value if group["scale"] else 1))

    def change(i, model, optimizer, x):
        if i == 3:
            optimizer.param_groups[0]["scale"] = Scale()
        if i > 3:
            optimizer.param_groups[0]["scale"].value /= 2

    models = [train(mode, change, make=lambda model: Scaled(model.parameters()))[0] for mode in (None, "forward")]
    for p, q in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        assert torch.equal(p, q)
