"""Weight gradients in a queue: when they come, and what is left of them."""

import gc
import threading

import pytest
import torch
from torch import nn

from _runtime.split_calls.against_stock import weights_of
from gradweave._runtime.split_calls.gradient_node import GradientNode, NodeSink
from gradweave._runtime.split_calls.queue import InlineLane, WeightGradientQueue
from gradweave._runtime.split_calls.queued_calls import QueuedCalls
from gradweave._runtime.split_calls.shared_nodes import NodeUse, SharedNode
from gradweave._runtime.split_calls.task import Task


def test_all_input_gradients_come_before_delayed_weight_gradients():
    order = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            order.append(ctx.name)
            return grad, None

    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    for index, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, index=index: order.append(f"W{index}"))
    for delayed, expected in ((True, "X2 X1 X0 W2 W1 W0"), (False, "W2 X2 W1 X1 W0 X0")):
        order.clear()
        x = torch.randn(2, 4, requires_grad=True)
        with QueuedCalls(WeightGradientQueue(InlineLane()), weights_of(model) if delayed else None):
            for index, layer in enumerate(model):
                x = layer(Noted.apply(x, f"X{index}"))
        x.sum().backward()
        assert " ".join(order) == expected


def test_a_backward_that_fails_can_be_followed_by_another():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("on purpose")

    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    queue = WeightGradientQueue(InlineLane())
    with QueuedCalls(queue, weights_of(model)):
        x = model[0](torch.randn(2, 4, requires_grad=True))
        loss = model[2](model[1](Fails.apply(x))).sum()
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    assert queue.held_bytes > 0
    del loss, x
    model.zero_grad()
    x = torch.randn(2, 4)
    with QueuedCalls(queue, weights_of(model)):
        model[2](model[1](model[0](x))).sum().backward()
    gc.collect()
    assert queue.held_bytes == 0
    made = [p.grad for p in model.parameters()]
    model.zero_grad()
    model[2](model[1](model[0](x))).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), made, strict=True))


def test_gradients_of_inputs_alone_leave_nothing_behind():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    queue = WeightGradientQueue(InlineLane())
    x = torch.randn(2, 4, requires_grad=True)
    with QueuedCalls(queue, weights_of(model)):
        loss = model(x).sum()
    expected = torch.autograd.grad(model(x).sum(), [x, model[2].weight])
    made = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert queue.held_bytes == 0
    assert torch.equal(made, expected[0])
    made = torch.autograd.grad(loss, model[2].weight, retain_graph=True)[0]
    assert torch.equal(made, expected[1])
    loss.backward(inputs=[model[0].weight], retain_graph=True)
    loss.backward(inputs=[model[0].weight])
    assert queue.held_bytes == 0
    assert torch.equal(model[0].weight.grad, 2 * torch.autograd.grad(model(x).sum(), model[0].weight)[0])


def test_nothing_is_left_behind_by_many_steps():
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(3, 3, 1), nn.Linear(4, 4))
    queue = WeightGradientQueue(InlineLane())

    def alive():
        gc.collect()
        return sum(type(one) in (GradientNode, NodeSink, Task, SharedNode, NodeUse) for one in gc.get_objects())

    counts = []
    for number in range(8):
        with QueuedCalls(queue, weights_of(model)):
            loss = model(torch.randn(2, 3, 4)).sum()
        if number % 2:
            loss.backward()
        del loss
        counts.append(alive())
    assert counts[-1] <= counts[0]


def test_two_threads_train_one_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    queue = WeightGradientQueue(InlineLane(), 64)
    expected = torch.autograd.grad(model(torch.ones(2, 4)).sum(), list(model.parameters()))
    wrong = []

    def work():
        for _ in range(100):
            with QueuedCalls(queue, weights_of(model)):
                loss = model(torch.ones(2, 4)).sum()
            made = torch.autograd.grad(loss, list(model.parameters()))
            if not all(torch.equal(a, b) for a, b in zip(made, expected, strict=True)):
                wrong.append(made)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
