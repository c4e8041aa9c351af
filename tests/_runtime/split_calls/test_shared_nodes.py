"""Gradients of weights with several uses: summed up as autograd does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from _runtime.split_calls.against_stock import check, gradients, precisions, ways, weights_of
from gradweave._runtime.split_calls.queue import InlineLane, WeightGradientQueue
from gradweave._runtime.split_calls.queued_calls import QueuedCalls


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        x = self.mix(torch.tanh(self.mix(self.embedding(x))))
        return F.linear(x, self.embedding.weight)


@pytest.mark.parametrize("backwards", [1, 3])
@ways
def test_tied_and_reused_weights_and_accumulation(delayed, budget, backwards):
    check(Tied(), torch.randint(0, 11, (3, 5)), delayed=delayed, budget=budget, backwards=backwards)


@pytest.mark.parametrize("uses", [2, 4])
@precisions
def test_one_layer_used_many_times(uses, autocast):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            for _ in range(uses):
                x = torch.tanh(self.layer(x))
            return x

    check(Loop(), torch.randn(5, 6), autocast=autocast)


def test_several_forwards_before_one_backward():
    def gradients_of(split):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        queue = WeightGradientQueue(InlineLane(), 40)
        total = 0
        for _ in range(2):
            with QueuedCalls(queue, weights_of(model)) if split else torch.enable_grad():
                total = total + model(torch.randn(3, 4)).square().sum()
        total.backward()
        assert queue.peak_bytes <= 40
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients_of(True), gradients_of(False), strict=True))


def test_hooks_see_the_whole_gradient_once():
    def count(split):
        model = Tied()
        seen = []
        for p in model.parameters():
            p.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        return gradients(model, torch.randint(0, 11, (3, 5)), split=split)[0], seen

    torch.manual_seed(1)
    made, seen = count(True)
    torch.manual_seed(1)
    expected, stock = count(False)
    assert all(torch.equal(a, b) for a, b in zip(made[2:], expected[2:], strict=True))
    assert len(seen) == len(stock) == 6
    assert sum(float(x.sum()) for x in seen) == pytest.approx(sum(float(x.sum()) for x in stock))
