"""Gradients that autograd hands on before they are computed."""

import pytest
import torch
from torch import nn

from gradweave._runtime.deferred.late import LateGradient
from gradweave._runtime.split_calls.queue import InlineLane, WeightGradientQueue
from gradweave._runtime.split_calls.task import Task
from gradweave.reordering.deferred_gradients import DeferredLayerGradients, are_of_layer, may_defer


def defer(dtype=torch.float32):
    layer, queue, ran = nn.Linear(3, 2), WeightGradientQueue(InlineLane()), []

    def compute():
        ran.append(1)
        return torch.ones(3, 2, dtype=dtype).t(), torch.ones(2, dtype=dtype)

    tasks = [Task(0, (torch.ones(2),), compute) for _ in range(2)]
    for task in tasks:
        queue.add(task)
    return layer, queue, ran, DeferredLayerGradients(queue, tasks, [layer.weight, layer.bias])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stand_in_is_computed_at_its_use(dtype):
    _, queue, ran, deferred = defer(dtype)
    stand_in, of_bias = deferred.stand_ins()
    assert type(stand_in) is type(of_bias) is LateGradient
    assert stand_in.dtype is of_bias.dtype is torch.float32
    assert (ran, deferred.is_over) == ([], False)
    assert torch.equal(stand_in + 0, torch.full((2, 3), 2.0))
    assert (len(ran), deferred.is_over, queue.held_bytes) == (2, True, 0)


def test_stand_ins_in_grad_are_replaced_by_gradients():
    layer, _, _, deferred = defer(torch.bfloat16)
    layer.weight.grad, layer.bias.grad = deferred.stand_ins()
    assert type(layer.weight.grad) is LateGradient
    assert deferred.is_in_grad
    deferred.settle_in_place()
    assert type(layer.weight.grad) is torch.Tensor
    assert layer.weight.grad.dtype is torch.float32
    assert layer.weight.grad.is_contiguous()
    assert not deferred.is_in_grad


def test_inputs_are_kept_until_the_gradients_are_done():
    _, queue, ran, deferred = defer()
    stand_in, _ = deferred.stand_ins()
    assert torch.equal(stand_in.source.ready(), torch.full((2, 3), 2.0))
    assert (len(ran), deferred.is_over) == (2, False)
    assert queue.held_bytes > 0
    stand_in.source.done()
    assert deferred.is_over
    assert queue.held_bytes == 0


def test_gradients_without_a_stand_in_are_not_wanted():
    _, queue, ran, deferred = defer()
    stand_ins = deferred.stand_ins()
    assert deferred.is_wanted
    del stand_ins
    assert not deferred.is_wanted
    deferred.drop()
    assert (ran, deferred.is_over, queue.held_bytes) == ([], True, 0)


def test_what_backward_reads_cannot_be_deferred():
    def try_defer(p):
        answers = []

        class Asks(torch.autograd.Function):
            @staticmethod
            def forward(ctx, p):
                return p.clone()

            @staticmethod
            def backward(ctx, gradient):
                answers.append(may_defer(p))
                return gradient

        Asks.apply(p).sum().backward()
        return answers

    p = nn.Parameter(torch.ones(2, 2))
    assert try_defer(p) == [True]
    assert try_defer(p) == [False]  # there is a gradient to accumulate onto
    assert not may_defer(torch.ones(2))
    assert not may_defer(p * 2)


def test_a_weight_with_the_bias_of_another_layer_is_of_neither():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    weights = {0: (one.weight, one.bias), 1: (other.weight, other.bias)}
    assert are_of_layer(weights, 0, one.weight, one.bias)
    assert not are_of_layer(weights, 0, one.weight, other.bias)
    assert not are_of_layer(weights, 0, one.weight, None)
    assert not are_of_layer(weights, 2, one.weight, one.bias)
