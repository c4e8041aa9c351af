"""Stages in one process."""

import torch
from torch import nn
from torch.optim import SGD

from gradweave.fusion import fuse
from gradweave.parallel.pipeline.stage import ForwardAutocast, StageLayers
from gradweave.parallel.pipeline.weight_gradients import StageSplit, WeightGradientLedger


def test_weight_gradients_are_held_back_right_after_a_fused_update_too():
    split = StageSplit(WeightGradientLedger(None))
    stage = StageLayers([("0", nn.Linear(4, 4)), ("1", nn.Linear(4, 4))], split, ForwardAutocast(torch.device("cpu")))
    optimizer = SGD(stage.layers.parameters(), lr=0.1)
    with fuse(stage.layers, optimizer, mode="forward"):
        for _ in range(3):
            stage(torch.randn(2, 4)).sum().backward()
            assert len(split.tasks) == 2
            split.build()()
            optimizer.step()
            optimizer.zero_grad()


def test_a_tuple_goes_to_the_next_layer_as_one():
    class Sum(nn.Module):
        def forward(self, given):
            return given[0] + given[1]

    stage = StageLayers([("0", Sum())], None, ForwardAutocast(torch.device("cpu")))
    assert torch.equal(stage(torch.ones(2), torch.ones(2)), 2 * torch.ones(2))
