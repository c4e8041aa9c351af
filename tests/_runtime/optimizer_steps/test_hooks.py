"""Hooks around steps that are compiled."""

import pytest
import torch

from fusion.loops import adamw, assert_same, batches, loss_of, make_net
from gradweave.errors import GradweaveError
from gradweave.fusion import fuse


def test_a_step_that_is_compiled():
    def run(mode):
        torch._dynamo.reset()
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(6):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            torch.compile(optimizer.step, backend="eager")()
        if fusion:
            fusion.detach()
        return model, optimizer

    expected = run(None)
    assert_same(run("forward"), expected)
    assert_same(run("auto"), expected)
    with pytest.raises(GradweaveError, match="a compiled optimizer"):
        run("backward")
