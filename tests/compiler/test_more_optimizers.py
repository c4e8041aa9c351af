"""Optimizers beyond element-wise ones: with matrix products, values taken out of tensors, signs."""

import math

import pytest
import torch
from torch import nn, optim

from compiler.models import assert_identical, batches, both, counting, loss_fn, train
from gradweave.compiler import program


class Matrices(nn.Module):
    """Nothing but matrices, which is what Muon is for."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(48, 8, bias=False), nn.Linear(8, 5, bias=False)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Lion(optim.Optimizer):
    """Signs of an interpolated momentum."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                mean = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(mean.clone().mul_(beta1).add_(p.grad, alpha=1 - beta1).sign_(), alpha=-group["lr"])
                mean.mul_(beta2).add_(p.grad, alpha=1 - beta2)


MORE = {
    "muon": (Matrices, lambda p: optim.Muon(p, lr=1e-2)),
    "muon, adjusted": (
        Matrices, lambda p: optim.Muon(p, lr=1e-2, weight_decay=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    ),
    "adafactor": (lambda: nn.Linear(48, 5), lambda p: optim.Adafactor(p)),
    "adafactor, everything": (
        lambda: nn.Linear(48, 5),
        lambda p: optim.Adafactor(p, 0.1, -0.7, (1e-20, 1e-3), d=1.5, weight_decay=0.01, maximize=True),
    ),
    "lion": (lambda: nn.Linear(48, 5), lambda p: Lion(p, lr=1e-3, weight_decay=0.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_a_replay_is_the_eager_step_bit_for_bit(name, warned):
    make_model, make_optimizer = MORE[name]
    made, expected, step = both(make_model, loss_fn, list(batches(5)), make_optimizer=make_optimizer)
    assert_identical(made, expected)
    assert step.eager_reason is None
    assert not warned()


@pytest.mark.parametrize(("name", "tolerance"), [("muon", 1e-3), ("adafactor, everything", 1e-5), ("lion", 1e-5)])
def test_inductor_compiles_it(name, tolerance, warned):
    """Muon multiplies matrices in bfloat16."""
    make_model, make_optimizer = MORE[name]
    made, expected, step = both(make_model, loss_fn, list(batches(5)), "inductor", make_optimizer=make_optimizer)
    torch.testing.assert_close(made[2], expected[2], rtol=tolerance, atol=0)
    assert step.eager_reason is None
    assert not warned()


def test_a_gradient_that_is_not_finite_is_treated_by_adafactor_as_in_an_eager_step():
    """Python's ``max(1.0, nan)`` is 1.0, and ``max(nan, 1.0)`` is nan."""
    data = list(batches(4))
    data[2][0][0, 0] = math.nan

    def objective(model, x, y):
        return (model(x)[:, :2].mean(1) * y).square().mean()

    made, expected, step = both(
        lambda: nn.Linear(48, 5), objective, data, make_optimizer=lambda p: optim.Adafactor(p, weight_decay=0.1)
    )
    assert step.eager_reason is None
    for mine, theirs in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_coefficients_of_muon_are_part_of_a_graph(monkeypatch):
    made = []
    monkeypatch.setattr(program, "trace_step", counting(program.trace_step, made))

    def each(number, model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
        optimizer.param_groups[0]["ns_coefficients"] = (3.4, -4.7, 2.0) if number < 4 else (3.0, -4.0, 2.0)

    def matrices(params):
        return optim.Muon([p for p in params if p.dim() == 2])

    def frozen(model, x, y):
        return loss_fn(model, x, y) + 0 * model.bias.detach().sum()

    assert_identical(*(train("linear", lower, matrices, steps=7, each=each, loss=frozen) for lower in ("replay", None)))
    assert len(made) == 2
