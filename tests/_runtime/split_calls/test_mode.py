"""The calls of a forward that are split, and those that run stock."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from _runtime.split_calls.against_stock import check, precisions, ways
from gradweave._runtime.split_calls.gradient_node import NodeSink
from gradweave._runtime.split_calls.queue import InlineLane, WeightGradientQueue
from gradweave._runtime.split_calls.queued_calls import QueuedCalls
from gradweave._runtime.split_calls.shared_nodes import NodeUse


class Attends(nn.Module):
    def __init__(self, ways):
        super().__init__()
        sizes = {"kdim": 6, "vdim": 6} if ways == "of other widths" else {}
        self.ways = ways
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, bias=ways != "without biases", **sizes)

    def forward(self, x):
        x = x + 1
        other = {"to itself": x, "of other widths": x[..., :6]}.get(self.ways, x * 2)
        weights = self.ways == "with its weights"
        return self.attention(x, other, other, need_weights=weights, attn_mask=torch.ones(5, 5).tril() == 0)[0]


@ways
@precisions
@pytest.mark.parametrize("what", ["to itself", "to another", "of other widths", "with its weights", "without biases"])
def test_attention(what, autocast, delayed, budget, monkeypatch):
    model, left = Attends(what), []
    for kind in (NodeSink, NodeUse):
        monkeypatch.setattr(kind, "add", lambda self, task, add=kind.add: (left.append(self), add(self, task)))
    check(model, torch.randn(2, 5, 8), autocast=autocast, delayed=delayed, budget=budget)
    projections = {"to itself": 2, "of other widths": 1 if autocast else 4}.get(what, 3)
    assert len(left) == projections


class AttendsTwice(nn.Module):
    """To latents that are a leaf, with weights that are used twice."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, 11, 24))
        self.attention = nn.MultiheadAttention(32, 4, kdim=24, vdim=24, batch_first=True)

    def forward(self, x):
        for _ in range(2):
            x = self.attention(x, self.latents, self.latents, need_weights=False)[0]
        return x


@precisions
def test_attention_twice_to_a_leaf(autocast):
    check(AttendsTwice(), torch.randn(4, 9, 32), autocast=autocast)


def test_attention_is_made_of_what_torch_is_made_of_now(monkeypatch):
    model, x, seen = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8), []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: (seen.append(1), real(*a, **k))[1])
    with QueuedCalls(WeightGradientQueue(InlineLane())):
        model(x, x, x, need_weights=False)
    assert seen


def test_attention_that_another_mode_looks_at_is_not_taken_apart():
    class Mine(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += func is F.multi_head_attention_forward
            return func(*args, **(kwargs or {}))

    model, x = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8)
    with Mine() as mode, QueuedCalls(WeightGradientQueue(InlineLane())):
        model(x, x, x)[0].sum().backward()
    assert mode.seen == 1


def test_frozen_weights_and_biases():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    model[2].requires_grad_(False)
    check(model, torch.randn(3, 8))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.two(checkpoint(lambda x: torch.tanh(self.one(x)), x, use_reentrant=reentrant))

    check(Checkpointed(), torch.randn(3, 8))


def test_no_grad_and_function_transforms_run_stock():
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with QueuedCalls(WeightGradientQueue(InlineLane())):
        with torch.no_grad():
            assert not model(x).requires_grad
        weights = dict(model.named_parameters())
        made = torch.func.grad(lambda w: torch.func.functional_call(model, w, (x,)).sum())(weights)
    assert torch.equal(made["weight"], x.sum(0).expand(4, 4))


def test_odd_shapes_run_stock():
    x = torch.randn(3, 4)
    for weight, bias in (
        (torch.randn(4, requires_grad=True), None),
        (torch.randn(2, 4, requires_grad=True), torch.randn(1, 2, requires_grad=True)),
        (torch.randn(0, 4, requires_grad=True), torch.randn(0, requires_grad=True)),
    ):
        with QueuedCalls(WeightGradientQueue(InlineLane())):
            F.linear(x, weight, bias).sum().backward()
        made, weight.grad = weight.grad, None
        F.linear(x, weight, bias).sum().backward()
        assert torch.equal(made, weight.grad)
