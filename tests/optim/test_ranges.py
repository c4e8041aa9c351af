"""Vectors, gradients and parameters at the ends of what floating point can hold: weights never become NaN."""

import pytest
import torch
from torch import nn

from gradweave.optim import Eva, EvaF, EvaS

FAMILY = [Eva, EvaF, EvaS]


every = pytest.mark.parametrize("cls", FAMILY)


def are_finite(model):
    return all(p.isfinite().all() for p in model.parameters())


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
