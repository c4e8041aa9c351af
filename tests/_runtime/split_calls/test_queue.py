from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradweave._runtime.split_calls.queue import InlineLane, WeightGradientQueue
from gradweave._runtime.split_calls.task import Task
from gradweave.errors import GradweaveError


def task(layer, elements, ran):
    grad = torch.ones(elements)

    def compute():
        ran.append(layer)
        return grad.sum(), None

    return Task(layer, (grad,), compute)


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 100) | st.none(), st.randoms())
def test_the_oldest_run_over_the_bound_and_each_runs_once(sizes, budget, random):
    ran = []
    queue = WeightGradientQueue(InlineLane(), budget)
    tasks = [task(number, size, ran) for number, size in enumerate(sizes)]
    for one in tasks:
        queue.add(one)
        assert budget is None or queue.held_bytes <= budget
        assert queue.held_bytes == sum(t.held_bytes for t in tasks[: one.layer + 1] if not t.is_finished)
    assert ran == sorted(ran)
    random.shuffle(tasks)
    for one in tasks:
        queue.finish(one)
        queue.finish(one)
        assert float(one.take()[0]) == sizes[one.layer]
        with pytest.raises(GradweaveError, match="gone"):
            one.take()
    assert queue.held_bytes == 0
    assert sorted(ran) == list(range(len(sizes)))
    assert budget is None or queue.peak_bytes <= budget


def test_a_task_goes_with_its_graph():
    ran = []
    queue = WeightGradientQueue(InlineLane())
    one = task(0, 4, ran)
    queue.add(one)
    assert queue.held_bytes == 16
    del one
    assert (queue.held_bytes, ran) == (0, [])


def test_a_task_that_outlives_its_backward_holds_all_its_inputs_within_the_bound():
    queue = WeightGradientQueue(InlineLane(), 100)
    tasks = []
    for layer in range(3):
        grad, x = torch.ones(4), torch.ones(8)
        tasks.append(Task(layer, (grad,), lambda grad=grad, x=x: (grad.sum() + x.sum(), None), (x,)))
        queue.add(tasks[-1])
    assert queue.held_bytes == 3 * 16
    assert all(one.can_outlive_backward for one in tasks)
    for one in tasks:
        queue.outlive_backward(one)
        assert queue.held_bytes <= 100
    assert queue.peak_bytes <= 100
    assert tasks[0].is_finished
    assert [float(queue.finish_and_take(one)[0]) for one in tasks] == [12.0] * 3
    assert queue.held_bytes == 0


def test_inputs_that_were_overwritten_are_noticed():
    queue = WeightGradientQueue(InlineLane())
    grad, x = torch.ones(4), torch.ones(8)
    one = Task(0, (grad,), lambda: (grad.sum() + x.sum(), None), (x,))
    queue.add(one)
    queue.outlive_backward(one)
    x.zero_()
    with pytest.raises(GradweaveError, match="changed in place"):
        queue.make_ready(one)
    with pytest.raises(GradweaveError, match="changed in place"):
        queue.finish(one)
    queue.drop(one)
    assert queue.held_bytes == 0


def test_a_recorder_sees_each_task_once():
    seen = []

    @contextmanager
    def recorder(layer):
        seen.append(layer)
        yield

    queue = WeightGradientQueue(InlineLane())
    queue.recorder = recorder
    ran = []
    one, two = task(0, 4, ran), task(1, 4, ran)
    queue.add(one)
    queue.recorder = None
    queue.add(two)
    assert float(queue.finish_and_take(one)[0]) == 4
    queue.finish(two)
    assert (seen, ran) == ([0], [0, 1])


def test_the_end_of_a_backward_drops_what_this_backward_has_left():
    """Also where it runs inside of another, as reentrant checkpoints run theirs."""

    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, callback):
            ctx.callback = callback
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            ctx.callback()
            return gradient, None

    queue, ran, seen = WeightGradientQueue(InlineLane()), [], []
    outer, inner = task(0, 4, ran), task(1, 4, ran)

    def run_inner():
        queue.add(outer)
        with torch.enable_grad():
            Calls.apply(torch.ones(1, requires_grad=True), lambda: queue.add(inner)).sum().backward()
        seen.append((outer.is_finished, inner.is_finished))

    Calls.apply(torch.ones(1, requires_grad=True), run_inner).sum().backward()
    assert seen == [(False, True)]
    assert outer.is_finished
    assert (ran, queue.held_bytes) == ([], 0)
