"""The gradient norm of steps whose gradients are freed before they end."""

import copy

import pytest
import torch

from fusion.loops import adamw, batches, loss_of, make_net
from gradweave.errors import GradweaveError
from gradweave.fusion import fuse


def step(model, optimizer, x, y):
    loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_the_norm_is_that_of_stock_order(mode):
    model = make_net()
    optimizer = adamw(model)
    fusion = fuse(model, optimizer, mode, track_grad_norm=True)
    norms = []
    with pytest.raises(GradweaveError, match="no step has been taken"):
        fusion.grad_norm()
    for x, y in batches(5):
        step(model, optimizer, x, y)
        norms.append(float(fusion.grad_norm()))
    fusion.detach()

    stock, expected = make_net(), []
    optimizer = adamw(stock)
    for x, y in batches(5):
        loss_of(stock, x, y).backward()
        expected.append(float(torch.nn.utils.get_total_norm([p.grad for p in stock.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
    assert norms == expected
    with fuse(model, optimizer := adamw(model), mode) as untracked:
        step(model, optimizer, *next(batches(1)))
        with pytest.raises(GradweaveError, match="track_grad_norm=True"):
            untracked.grad_norm()


def test_the_norm_counts_parameters_that_were_unfrozen():
    model = make_net()
    model.inner.requires_grad_(False)
    optimizer = adamw(model)
    with fuse(model, optimizer, "backward", track_grad_norm=True) as fusion:
        for i, (x, y) in enumerate(batches(4)):
            if i == 2:
                model.inner.requires_grad_(True)
            twin = copy.deepcopy(model)
            loss_of(twin, x, y).backward()
            expected = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(fusion.grad_norm(), expected)
