"""Loops as people write them: Eva's weights and state are, bit for bit, those of the plain loop that they come to.

A loop is a sequence of acts. What it comes to is written down apart, as the batches of each step that is taken, and
trained plainly with a fresh optimizer: whatever else happened must have left no trace.
"""

import copy
import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradweave.optim import Eva, EvaF
from optim.models import loss_of, weights

BATCHES = [torch.randn(size, 6, generator=torch.Generator().manual_seed(size)) for size in (3, 4, 5, 7)]


class Net(nn.Module):
    """A layer that is used twice, one with many outputs, one without a bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3, bias=False)

    def forward(self, x):
        return self.head(self.twice(self.twice(self.first(x).tanh()).tanh()))


class Loop:
    """A model in training, and the batches that each step it took was of."""

    def __init__(self, kind):
        self.kind = kind
        self.model = Net()
        self.optimizer = kind(self.model, lr=0.05)
        self.gathered = []
        self.steps = []

    def backward(self, x):
        loss_of(self.model, x).backward()
        self.gathered.append(("once", x))

    def in_segments(self, x):
        """Under activation checkpointing, whose forward runs twice."""
        y = checkpoint(self.model, x, use_reentrant=False)
        (y - 1).square().mean().backward()
        self.gathered.append(("once", x))

    def twice_over_a_graph(self, x):
        loss = loss_of(self.model, x)
        loss.backward(retain_graph=True)
        loss.backward()
        self.gathered += [("once", x), ("once", x)]

    def two_forwards(self, x):
        """Both before the backward of either."""
        first, second = loss_of(self.model, x), loss_of(self.model, x * 2)
        first.backward()
        second.backward()
        self.gathered += [("once", x), ("once", x * 2)]

    def evaluation_between(self, x):
        loss = loss_of(self.model, x)
        self.evaluate(x * 3)
        loss.backward()
        self.gathered.append(("once", x))

    def evaluate(self, x):
        with torch.no_grad():
            self.model.eval()(x)
        self.model.train()

    def evaluate_elsewhere(self, x):
        """In another thread, with gradients on."""
        thread = threading.Thread(target=lambda: self.model(x))
        thread.start()
        thread.join()

    def forward_thrown_away(self, x):
        self.model(x).sum()

    def saliency(self, x):
        x = x.clone().requires_grad_()
        torch.autograd.grad(self.model(x).sum(), x)

    def a_copy_trains(self, x):
        twin = copy.deepcopy(self.model)
        loss_of(twin, x).backward()

    def step(self, _):
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.gathered:
            self.steps.append(self.gathered)
        self.gathered = []

    def thrown_away(self, _):
        """A loss that was not good."""
        self.optimizer.zero_grad()
        self.gathered = []

    def not_finite(self, x):
        """The optimizer leaves such a step out by itself, and so do the momentum and vectors."""
        self.thrown_away(x)
        loss_of(self.model, x * float("inf")).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def failing_forward(self, x):
        with suppress(RuntimeError):
            self.model(x[:, :3])

    def save_and_load(self, _):
        """In the middle of anything, into the same optimizer."""
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def resume(self, _):
        """Into another model, with gradients that are there."""
        grads = [p.grad for p in self.model.parameters()]
        model = Net()
        model.load_state_dict(self.model.state_dict())
        optimizer = self.kind(model, lr=0.05)
        optimizer.load_state_dict(self.optimizer.state_dict())
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = None if grad is None else grad.clone()
        self.model, self.optimizer = model, optimizer


ACTS = [name for name in vars(Loop) if not name.startswith("_")]


def plainly(kind, steps):
    model = Net()
    optimizer = kind(model, lr=0.05)
    for gathered in steps:
        for _, x in gathered:
            loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@settings(max_examples=settings().max_examples // 2)
@given(
    st.sampled_from([Eva, EvaF]),
    st.lists(st.tuples(st.sampled_from([*ACTS, "step", "step", "backward"]), st.integers(0, 3)), max_size=12),
)
def test_any_loop_comes_to_its_steps(kind, acts):
    loop = Loop(kind)
    for name, number in acts:
        getattr(loop, name)(BATCHES[number])
    loop.step(None)
    model, optimizer = plainly(kind, loop.steps)
    assert torch.equal(weights(loop.model), weights(model))
    for p, q in zip(loop.model.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[q].items():
            mine = loop.optimizer.state[p][key]
            assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, key


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("kind", [Eva, EvaF])
def test_tracing_a_model_leaves_no_trace(kind):
    loop = Loop(kind)
    for x in BATCHES:
        loss = loss_of(loop.model, x)
        traced = torch.jit.trace(loop.model, x * 3)
        assert torch.equal(traced(x), loop.model(x))
        loss.backward()
        loop.step(None)
        loop.steps.append([("once", x)])
    model, _ = plainly(kind, loop.steps)
    assert torch.equal(weights(loop.model), weights(model))
