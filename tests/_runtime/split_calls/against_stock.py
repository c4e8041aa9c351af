"""Comparison of split layers with stock ones: outputs and gradients, bit for bit."""

import copy

import pytest
import torch
from torch import nn

from gradweave._runtime.split_calls.queue import InlineLane, WeightGradientQueue
from gradweave._runtime.split_calls.queued_calls import QueuedCalls


def weights_of(model):
    layers = (m for m in model.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd)))
    return {number: (m.weight, m.bias) for number, m in enumerate(layers)}


def gradients(model, x, *, split, delayed=True, budget=None, autocast=False, backwards=1, loss=None):
    """Output, input gradient and weight gradients of a forward and backward, or several."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.is_floating_point())
    queue = WeightGradientQueue(InlineLane(), budget)
    model.zero_grad()
    for _ in range(backwards):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if split:
                with QueuedCalls(queue, weights_of(model) if delayed else None):
                    out = model(x)
            else:
                out = model(x)
        (loss or (lambda y: y.float().square().sum()))(out).backward()
    assert queue.held_bytes == 0
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())], queue


def check(model, x, **options):
    made, queue = gradients(model, x, split=True, **options)
    kept = {key: value for key, value in options.items() if key in ("autocast", "backwards", "loss")}
    expected, _ = gradients(copy.deepcopy(model), x, split=False, **kept)
    assert len(made) == len(expected)
    for one, other in zip(made, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one, other)
    return queue


ways = pytest.mark.parametrize(("delayed", "budget"), [(True, None), (True, 0), (True, 4096), (False, None)])


precisions = pytest.mark.parametrize("autocast", [False, True])
