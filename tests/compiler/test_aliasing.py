import pytest
import torch
from torch import nn, optim

import gradweave
from compiler.models import assert_identical, batches, loss_fn
from gradweave.compiler.aliasing import Aliasing, checksums, has_aliases, merge_inputs, repeated_inputs


class Pair(nn.Module):
    """Two layers that may have one memory for their weights, or a part of it."""

    def __init__(self, tie=None):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(48, 48) for _ in range(3))
        self.head = nn.Linear(48, 5)
        self.register_buffer("seen", torch.zeros(48))
        self.tie(tie)

    def tie(self, how):
        if how == "whole":
            self.two.weight.data = self.one.weight.data
        elif how == "overlapping":
            memory = torch.cat([self.one.weight.detach(), self.two.weight.detach()[:4]]).clone()
            self.one.weight.data, self.two.weight.data = memory[:48], memory[4:]
        elif how == "parameter":
            self.two.weight = self.one.weight
        elif how == "buffer":
            self.seen = self.two.bias.data

    def forward(self, x):
        self.seen.add_(0.01)
        return self.head(torch.tanh(self.three(torch.tanh(self.two(torch.tanh(self.one(x)))))))


@pytest.mark.parametrize("tie", ["whole", "overlapping", "parameter", "buffer"])
@pytest.mark.parametrize("when", ["before", "later"])
def test_weights_that_share_memory(tie, when):
    def run(lower):
        model = Pair(tie if when == "before" else None)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower) if lower else None
        losses = []
        for number, (x, y) in enumerate(batches(7)):
            if number == 3 and when == "later":
                model.tie(tie)
            if step:
                losses.append(step(x, y))
                continue
            losses.append(loss_fn(model, x, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, torch.stack(losses).detach()

    assert_identical(run("replay"), run(None))


def test_tensors_may_move_as_long_as_they_share_memory_in_the_same_way():
    whole = torch.zeros(6)
    aliasing = Aliasing([whole, whole[:4], torch.zeros(2)])
    moved = torch.zeros(6)
    assert aliasing.holds_for([moved, moved[:4], torch.zeros(2)])
    assert not aliasing.holds_for([moved, moved[1:5], torch.zeros(2)])
    assert not aliasing.holds_for([moved, torch.zeros(4), torch.zeros(2)])


def test_tensors_of_a_batch_may_share_memory_among_themselves():
    batch = torch.zeros(6)
    parts = [batch[:3], batch[3:]]
    assert not has_aliases([torch.zeros(2), *parts], parts)
    assert has_aliases([torch.zeros(2), *parts], [])


def test_repeated_inputs_are_read_where_they_are_first():
    x, y = torch.ones(2), torch.full((2,), 2.0)
    assert repeated_inputs([x, y, x, 1, 1]) == ((2, 0),)
    forward = torch.fx.symbolic_trace(lambda a, b, c: (a + b) * c)
    assert torch.equal(merge_inputs(forward, ((2, 0),))(x, y, torch.zeros(2)), (x + y) * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_checksums_tell_a_changed_tensor(dtype):
    x = torch.ones(5, dtype=dtype)
    before = checksums([x])
    assert checksums([x.clone()]) == before
    x[3] = 0
    assert checksums([x]) != before


def test_checksums_tell_changes_beside_a_nan():
    x = torch.tensor([float("nan"), 1.0])
    before = checksums([x])
    assert checksums([x]) == before
    x[1] = 1 + 1e-6
    assert checksums([x]) != before
