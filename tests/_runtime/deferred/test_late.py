"""Late gradients with a source that only records its calls."""

import pytest
import torch
from torch import nn, optim

from gradweave._runtime.deferred.late import LateGradient, settle_gradients, settled
from gradweave.fusion import fuse


class Source:
    """A source of a gradient of ones that records its calls."""

    def __init__(self, like=None):
        self.like = torch.empty(3) if like is None else like.detach().clone()
        self.asked = []

    def settle(self):
        self.asked.append("settle")
        return torch.arange(3.0) if self.like.shape == (3,) else torch.ones_like(self.like)

    def ready(self):
        self.asked.append("ready")
        return self.settle()

    def done(self):
        self.asked.append("done")


def test_it_stands_for_the_gradient():
    source = Source()
    late = LateGradient(torch.empty(3), source)
    assert late.dtype is torch.float32
    assert late.device.type == "cpu"
    assert late.layout is torch.strided
    assert not late.requires_grad
    assert source.asked == []
    assert torch.equal(late + 1, torch.arange(3.0) + 1)
    assert late.sum() == 3
    assert "2." in repr(late)
    assert late.tolist() == [0, 1, 2]
    assert late.numpy().tolist() == [0, 1, 2]
    assert [float(norm) for norm in torch._foreach_norm([late])] == [pytest.approx(5**0.5)]
    assert torch.equal(settled(late), torch.arange(3.0))
    assert settled(5) == 5


def test_autograd_puts_it_into_grad_without_finishing_it():
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.sum()

        @staticmethod
        def backward(ctx, grad):
            return LateGradient(torch.empty(3), source)

    source = Source()
    weight = nn.Parameter(torch.zeros(3))
    Late.apply(weight).backward()
    assert type(weight.grad) is LateGradient
    assert source.asked == []
    Late.apply(weight).backward()
    assert "settle" in source.asked
    settle_gradients([weight])
    assert type(weight.grad) is torch.Tensor


@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW])
def test_forward_fusion_finishes_it_in_the_next_forward(make):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    fuse(model, optimizer, "forward")
    for number in range(3):
        sources = [Source(p) for p in model.parameters()]
        for p, source in zip(model.parameters(), sources, strict=True):
            p.grad = LateGradient(p.detach(), source)
        optimizer.step()
        assert [source.asked for source in sources] == ([["settle"]] * 2 if number == 0 else [[]] * 2)
        optimizer.zero_grad()
        if number:
            model(torch.ones(1, 3))
            assert [source.asked for source in sources] == [["settle"]] * 2
    stock = nn.Linear(3, 2)
    with torch.no_grad():
        for p, q in zip(stock.parameters(), before, strict=True):
            p.copy_(q)
    expected = make(stock.parameters(), lr=0.1)
    for _ in range(3):
        for p in stock.parameters():
            p.grad = torch.ones_like(p)
        expected.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), stock.parameters(), strict=True))
