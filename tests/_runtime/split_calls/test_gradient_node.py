"""Nodes of autograd at which the gradients of calls come together."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradweave._runtime.split_calls.gradient_node import GradientNode, add, in_precision, sum_of
from gradweave._runtime.split_calls.operations import split_linear
from gradweave._runtime.split_calls.queue import InlineLane, WeightGradientQueue


@pytest.mark.parametrize("calls", [1, 3])
def test_gradients_of_all_calls_are_summed_up(calls):
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    node = GradientNode(0, layer.weight, layer.bias, WeightGradientQueue(InlineLane()))
    sum(split_linear(x * number, node).square().sum() for number in range(1, calls + 1)).backward()
    made = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    sum(F.linear(x * number, layer.weight, layer.bias).square().sum() for number in range(1, calls + 1)).backward()
    for one, p in zip(made, layer.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad)


@pytest.mark.parametrize("calls", [1, 2])
def test_gradients_have_the_type_of_the_weight(calls):
    layer = nn.Linear(4, 3)
    node = GradientNode(0, layer.weight, layer.bias, WeightGradientQueue(InlineLane()))
    x = torch.randn(5, 4, dtype=torch.bfloat16)
    sum(split_linear(x, node).sum() for _ in range(calls)).backward()
    assert all(p.grad.dtype is torch.float32 for p in layer.parameters())


def test_tasks_of_another_backward_do_not_count():
    """It has come to the call, but has asked for the gradient of the input alone."""
    layer, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=True)
    queue = WeightGradientQueue(InlineLane())
    loss = split_linear(x, GradientNode(0, layer.weight, layer.bias, queue)).sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    assert torch.equal(layer.weight.grad, x.detach().sum(0).expand(3, 4))
    assert queue.held_bytes == 0


def test_a_node_goes_with_its_graph():
    layer = nn.Linear(4, 3)
    node = GradientNode(0, layer.weight, layer.bias, WeightGradientQueue(InlineLane()))
    sink = weakref.ref(node.sink)
    loss = split_linear(torch.randn(5, 4), node).sum()
    del node
    assert sink() is not None
    del loss
    gc.collect()
    assert sink() is None


def test_sums_of_gradients_that_may_be_missing():
    one = torch.ones(2)
    assert add(None, None) is None
    assert add(one, None) is add(None, one) is one
    of_weight, of_bias = sum_of([(one, None), (one, one), (one, None)])
    assert torch.equal(of_weight, 3 * one)
    assert torch.equal(of_bias, one)
    assert sum_of([]) == (None, None)
    low, missing = in_precision((torch.bfloat16, torch.bfloat16), (one, None))
    assert low.dtype is torch.bfloat16
    assert missing is None
