import copy

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import gradweave
from compiler.models import (
    adamw,
    assert_identical,
    batches,
    loss_fn,
    make,
)
from gradweave.errors import GradweaveError


@pytest.mark.parametrize("lower", ["replay", "inductor"])
def test_accumulation_over_micro_batches(lower):
    name = "mlp" if lower == "replay" else "small"

    def run(lower):
        model = make(name)
        optimizer = adamw(model.parameters())
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower, max_grad_norm=1.0) if lower else None
        norms = []
        for number, (x, y) in enumerate(batches(12)):
            last = number % 3 == 2
            if step and not last:
                with step.no_update():
                    step(x, y)
            elif step:
                step(x, y)
                norms.append(step.grad_norm)
            else:
                loss_fn(model, x, y).backward()
                if last:
                    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                    optimizer.step()
                    optimizer.zero_grad()
        return model, optimizer, torch.stack(norms)

    made, expected = run(lower), run(None)
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)
    if lower == "replay":
        assert_identical(made, expected)


def test_summed_gradients_can_be_seen_and_thrown_away():
    model = make("mlp")
    optimizer = adamw(model.parameters())
    step = gradweave.compile(model, loss_fn, optimizer, lower="replay")
    data = list(batches(5))
    step(*data[0])
    with step.no_update():
        step(*data[1])
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
        optimizer.zero_grad()
        step(*data[2])
    seen = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss_fn(model, *data[2]).backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), seen, strict=True))


def test_the_true_norm_is_available():
    model = make("mlp")
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", max_grad_norm=1e-3)
    data = list(batches(2))
    step(*data[0])
    twin = copy.deepcopy(model)
    loss_fn(twin, *data[1]).backward()
    step(*data[1])
    torch.testing.assert_close(step.grad_norm, nn.utils.get_total_norm([p.grad for p in twin.parameters()]))


def test_no_norm_without_clipping():
    model = make("mlp")
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay")
    with pytest.raises(GradweaveError, match="max_grad_norm"):
        _ = step.grad_norm


def test_clipping_by_value():
    def run(lower):
        model = make("mlp")
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower, max_grad_value=1e-3) if lower else None
        for x, y in batches(4):
            if step:
                step(x, y)
                continue
            loss_fn(model, x, y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, torch.zeros(1)

    assert_identical(run("replay"), run(None))


@pytest.mark.parametrize("lower", ["replay", "inductor"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_loss_scaling_leaves_out_updates_that_are_not_finite(lower, max_norm):
    name = "mlp" if lower == "replay" else "small"

    def run(lower):
        model = make(name)
        optimizer = adamw(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        step = None
        if lower:
            step = gradweave.compile(model, loss_fn, optimizer, lower=lower, scaler=scaler, max_grad_norm=max_norm)
        scales = []
        for number, (x, y) in enumerate(batches(10)):
            if number in (0, 5):
                x = x * float("inf")
            if step:
                step(x, y)
            else:
                scaler.scale(loss_fn(model, x, y)).backward()
                scaler.unscale_(optimizer)
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return model, optimizer, torch.tensor(scales)

    made, expected = run(lower), run(None)
    assert torch.equal(made[2], expected[2])
    assert len(expected[2].unique()) == 2
    assert all(entry["step"] == 8 for entry in made[1].state_dict()["state"].values())
    if lower == "replay":
        assert_identical(made, expected)
    for mine, theirs in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


class Sum(nn.Module):
    """Two parameters with one and the same gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Parameter(torch.randn(5, 48)), nn.Parameter(torch.randn(5, 48))
        self.shift = nn.Parameter(torch.zeros(7))

    def forward(self, x):
        return F.linear(x, self.one + self.two) + self.shift.sum()


@pytest.mark.parametrize("scaled", [False, True])
def test_parameters_with_one_gradient_are_clipped_and_unscaled_once(scaled):
    def run(lower):
        model = Sum()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
        step = None
        if lower:
            step = gradweave.compile(model, loss_fn, optimizer, lower=lower, max_grad_norm=0.1, scaler=scaler)
        for x, y in batches(4):
            if step:
                step(x, y)
                continue
            scaler.scale(loss_fn(model, x, y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return model, optimizer, torch.zeros(1)

    assert_identical(run("replay"), run(None))


@pytest.mark.parametrize("kind", ["zero-dimensional state", "asgd"])
def test_scaling_skips_all_state_of_a_compiled_step(kind):
    class Scalar(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(48, 5)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return self.inner(x) * self.scale

    class Normalised(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    size = self.state[p].setdefault("size", torch.ones(()))
                    size.mul_(0.9).add_(p.grad.norm(), alpha=0.1)
                    p.sub_(p.grad / size, alpha=group["lr"])

    def run(lower):
        model = Scalar()
        optimizer = Normalised(model.parameters()) if kind != "asgd" else optim.ASGD(model.parameters(), t0=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower, scaler=scaler) if lower else None
        for number, (x, y) in enumerate(batches(7)):
            x = x * float("inf") if number == 4 else x
            if step:
                step(x, y)
                continue
            scaler.scale(loss_fn(model, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [*model.parameters(), *(v for e in optimizer.state.values() for v in e.values())]

    for mine, theirs in zip(run("inductor"), run(None), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_scaler_that_is_loaded_again():
    model = make("mlp")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay", scaler=scaler)
    data = list(batches(4))
    step(*data[0])
    step(*data[1])
    scaler.load_state_dict({**scaler.state_dict(), "growth_interval": 1, "growth_factor": 4.0, "_growth_tracker": 0})
    step(*data[2])
    assert scaler.get_scale() == 32.0
