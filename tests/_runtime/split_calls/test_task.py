"""The life of a task: computed, finished, taken."""

from contextlib import contextmanager

import pytest
import torch

from gradweave._runtime.split_calls.task import Task
from gradweave.errors import GradweaveError


def make(ran, activations=True):
    grad, x = torch.ones(4), torch.full((8,), 2.0)

    def compute():
        ran.append(1)
        return grad.sum() + x.sum(), None

    return Task(3, (grad,), compute, (x,) if activations else ()), x


def test_it_is_computed_once_and_taken_once():
    ran = []
    task, _ = make(ran)
    task.compute()
    task.compute()
    assert not task.is_finished
    task.finish()
    assert task.is_finished
    assert float(task.result[0]) == float(task.take()[0]) == 20
    assert ran == [1]
    with pytest.raises(GradweaveError, match="it was taken"):
        task.take()


def test_it_holds_output_gradients_within_its_backward_and_all_inputs_beyond():
    task, _ = make([])
    assert task.held_bytes == 16
    assert task.can_outlive_backward
    task.outlive_backward()
    assert task.held_bytes == 48
    assert not make([], activations=False)[0].can_outlive_backward


def test_changed_inputs_are_an_error_once_they_are_watched():
    task, x = make([])
    x.zero_()
    task.check_inputs()
    task.watch_inputs()
    x.zero_()
    with pytest.raises(GradweaveError, match="changed in place before the deferred weight gradient"):
        task.finish()


def test_gradients_are_changed_where_they_are_computed():
    @contextmanager
    def recorder(layer):
        order.append(("begin", layer))
        yield
        order.append(("end", layer))

    order = []
    task, _ = make([])
    task.then(lambda gradients: (order.append("change"), (gradients[0] / 2, None))[1])
    task.record(recorder)
    task.finish()
    assert float(task.take()[0]) == 10
    assert order == [("begin", 3), "change", ("end", 3)]


def test_a_dropped_task_has_nothing():
    task, _ = make([])
    task.drop()
    assert task.is_finished
    with pytest.raises(GradweaveError, match="gone"):
        task.take()
