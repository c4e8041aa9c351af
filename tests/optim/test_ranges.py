"""Vectors, gradients and parameters at the ends of what floating point can hold: weights never become NaN."""

import pytest
import torch
from torch import nn

from gradweave.optim import Eva, EvaF, EvaS

FAMILY = [Eva, EvaF, EvaS]
every = pytest.mark.parametrize("cls", FAMILY)


def are_finite(model):
    return all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("cls", [Eva, EvaF])
@pytest.mark.parametrize("foreach", [None, False])
def test_an_input_that_dies_fades_from_its_vector(cls, foreach):
    """After some 130 steps the vector's square is so small that it has no inverse in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20, bias=False), nn.Linear(20, 2))
    optimizer = cls(model, foreach=foreach)
    for step in range(300):
        model(torch.randn(6, 4) * (step < 3)).sub(1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert are_finite(model)


def test_a_gradient_that_dies_fades_from_its_means():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = EvaS(model)
    for step in range(1100):
        (model(torch.randn(6, 4)).square().mean() * (step < 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert are_finite(model)


@every
@pytest.mark.parametrize("power", [-40, -20, 20, 45])
def test_the_size_of_the_loss_does_not_matter(cls, power):
    """Not even where a softmax has the gradient's columns add up to nothing."""

    def first_step(scale):
        torch.manual_seed(0)
        model = nn.Linear(30, 500, bias=False)
        before = model.weight.detach().clone()
        optimizer = cls(model, lr=0.01)
        loss = nn.functional.cross_entropy(model(torch.randn(64, 30)), torch.arange(64))
        (loss * scale).backward()
        optimizer.step()
        return model.weight.detach() - before

    step, other = first_step(1.0), first_step(2.0**power)
    assert other.norm() == pytest.approx(float(step.norm()), rel=0.02)
    assert torch.nn.functional.cosine_similarity(step.flatten(), other.flatten(), 0) > 0.99


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_low_precision_parameters_without_vectors(cls, dtype, rule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(dtype)
    optimizer = cls(model, lr=0.01, first_order=rule)
    for _ in range(5):
        (model(torch.arange(5)).float().square().mean() * 1e-4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert are_finite(model)
    state = optimizer.state[model[1].weight]
    if rule == "adamw":
        assert state["exp_avg_sq"].dtype is state["exp_avg"].dtype is torch.float32
        assert state["exp_avg_sq"].count_nonzero() > 0
    elif dtype is torch.float16:
        assert state["momentum_buffer"].dtype is torch.float32
    other = cls(model, lr=0.01, first_order=rule)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[model[1].weight].keys() == state.keys()
    for key, value in other.state[model[1].weight].items():
        assert value.dtype is state[key].dtype
        assert torch.equal(value, state[key])


@every
def test_a_loss_scale_that_has_grown_without_bound(cls):
    """With bfloat16 nothing overflows, and a scaler never backs off; scaled gradients have no square any more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20), nn.LayerNorm(20), nn.Linear(20, 2))
    optimizer = cls(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**80)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(torch.randn(6, 4)).square().mean()).backward()
    scaler.step(optimizer)
    assert are_finite(model)
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
