"""Runs that leave nothing behind."""

import random
import warnings

import pytest
import torch
from torch import nn

from gradweave._runtime.dry_run import silent_copy, unseen

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(random.random())
        return self.norm(x + torch.rand(()))


@pytest.mark.parametrize("copied", [True, False])
def test_nothing_is_left(copied):
    layer = Layer()
    if not copied:
        layer.more = (x for x in ())
    heard = []
    layer.norm.register_forward_hook(lambda *_: heard.append(1))
    torch.manual_seed(0)
    random.seed(0)
    wanted = torch.rand(2), random.random()
    torch.manual_seed(0)
    random.seed(0)
    with unseen(layer, CPU) as stand_in:
        stand_in(torch.rand(4, 3))
    assert layer.norm.num_batches_tracked == 0
    assert torch.equal(layer.norm.running_mean, torch.zeros(3))
    assert torch.equal(torch.rand(2), wanted[0])
    assert random.random() == wanted[1]
    assert heard == []
    layer(torch.rand(4, 3))
    assert heard == [1]
    if copied:
        assert layer.calls == len(layer.seen) == 1


def test_a_run_that_fails_leaves_nothing_either():
    layer = Layer()
    layer.more = (x for x in ())
    heard = []
    layer.register_forward_hook(lambda *_: heard.append(1))

    def fail():
        with unseen(layer, CPU) as stand_in:
            stand_in(torch.rand(4, 3))
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        fail()
    assert torch.equal(layer.norm.running_mean, torch.zeros(3))
    layer(torch.rand(4, 3))
    assert heard == [1]


def test_a_copy_shares_parameters_and_keeps_what_computes_weights():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linear = nn.utils.weight_norm(nn.Linear(3, 2))
    linear(torch.rand(4, 3))
    linear.register_forward_hook(lambda *_: pytest.fail("was seen"))
    copied = silent_copy(linear)
    assert copied.weight_g is linear.weight_g
    with torch.no_grad():
        linear.weight_g.mul_(2)
    x = torch.rand(4, 3)
    linear._forward_hooks.clear()
    assert torch.equal(copied(x), linear(x))
