"""Losses that contain derivatives: gradient penalties, and what is computed from weight gradients."""

import pytest
import torch
from torch import nn

from gradweave.reordering.api import reorder


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 1))


def reused():
    layer, conv = nn.Linear(6, 6), nn.Conv1d(1, 1, 3, padding=1)
    rows = nn.Sequential(nn.Unflatten(1, (1, 6)), conv, nn.Tanh(), conv, nn.Flatten())
    return nn.Sequential(layer, nn.Tanh(), rows, layer, nn.Softplus(), nn.Linear(6, 1))


def matrices():
    rows = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4, bias=False))
    return nn.Sequential(nn.Unflatten(1, (2, 3)), rows, nn.Flatten(), nn.Linear(8, 1))


def convolutions():
    convs = [nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.ConvTranspose1d(4, 2, 3, padding=1, bias=False)]
    return nn.Sequential(nn.Unflatten(1, (1, 6)), *convs, nn.Flatten(), nn.Linear(12, 1))


def of_interpolates(critic, real, fake):
    mixed = (0.3 * real + 0.7 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def of_real_samples(critic, real, fake):
    real = real.requires_grad_()
    out = critic(real)
    (slope,) = torch.autograd.grad(out.sum(), real, create_graph=True)
    return critic(fake).exp().mean() - out.mean() + slope.square().sum(1).mean()


def of_weights(critic, real, fake):
    loss = critic(real).mean() - critic(fake).mean()
    slopes = torch.autograd.grad(loss, list(critic.parameters()), create_graph=True, materialize_grads=True)
    return loss + sum(slope.square().sum() for slope in slopes)


@pytest.mark.parametrize("penalty", [of_interpolates, of_real_samples, of_weights])
@pytest.mark.parametrize("make", [mlp, reused, matrices, convolutions])
@pytest.mark.parametrize("seed", range(3))
def test_a_penalty_gives_the_stock_gradients(make, penalty, seed):
    def gradients(policy):
        torch.manual_seed(seed)
        critic = make()
        handle = reorder(critic, policy) if policy else None
        for _ in range(2):
            penalty(critic, torch.randn(5, 6), torch.randn(5, 6)).backward()
        assert handle is None or handle.most_bytes_held > 0
        return [p.grad for p in critic.parameters()]

    made, stock = gradients("side_stream"), gradients(None)
    assert all(torch.equal(a, b) for a, b in zip(made, stock, strict=True))
