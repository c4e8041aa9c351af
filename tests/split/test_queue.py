import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradweave.errors import GradweaveError
from gradweave.split.queue import Task, WeightGradientQueue
from gradweave.split.streams import InLine


def task(layer, elements, ran):
    grad = torch.ones(elements)

    def compute():
        ran.append(layer)
        return grad.sum(), None

    return Task(layer, (grad,), compute)


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 100) | st.none(), st.randoms())
def test_the_oldest_run_over_the_bound_and_each_runs_once(sizes, budget, random):
    ran = []
    queue = WeightGradientQueue(InLine(), budget)
    tasks = [task(number, size, ran) for number, size in enumerate(sizes)]
    for one in tasks:
        queue.add(one)
        assert budget is None or queue.held <= budget
        assert queue.held == sum(t.held for t in tasks[: one.layer + 1] if not t.is_finished)
    assert ran == sorted(ran)
    random.shuffle(tasks)
    for one in tasks:
        queue.finish(one)
        queue.finish(one)
        assert float(one.take()[0]) == sizes[one.layer]
        with pytest.raises(GradweaveError, match="gone"):
            one.take()
    assert queue.held == 0
    assert sorted(ran) == list(range(len(sizes)))
    assert budget is None or queue.most_held <= budget


def test_a_task_goes_with_its_graph():
    ran = []
    queue = WeightGradientQueue(InLine())
    one = task(0, 4, ran)
    queue.add(one)
    assert queue.held == 16
    del one
    assert (queue.held, ran) == (0, [])
