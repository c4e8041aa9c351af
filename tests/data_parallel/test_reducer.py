import pytest
import torch
from torch import nn

from gradweave.data_parallel.gradients import is_pending
from gradweave.data_parallel.reducer import Reducer
from gradweave.errors import GradweaveError


def chain(count=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(count)))


def reducer_of(model, **options):
    return Reducer([[part.weight] for part in reversed(model)], None, 1, **options)


def test_gradients_are_pending_behind_backward_and_right_when_looked_at():
    model = chain()
    model(torch.ones(2, 3)).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    reducer = reducer_of(model)
    model(torch.ones(2, 3)).sum().backward()
    assert all(is_pending(p.grad) for p in model.parameters())
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    reducer.close()
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    assert not any(is_pending(p.grad) for p in model.parameters())


def test_a_barrier_leaves_nothing_pending():
    model = chain()
    reducer_of(model, barrier=True)
    model(torch.ones(2, 3)).sum().backward()
    assert not any(is_pending(p.grad) for p in model.parameters())


def test_waiting_for_one_leaves_the_others():
    model = chain()
    reducer = reducer_of(model)
    model(torch.ones(2, 3)).sum().backward()
    reducer.wait_for([model[1].weight])
    assert [is_pending(p.grad) for p in model.parameters()] == [True, False, True, True]


def test_what_nobody_has_used_has_no_gradient():
    model = chain()
    reducer_of(model)
    model[:2](torch.ones(2, 3)).sum().backward()
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True]


def test_gradients_keep_the_layout_of_their_weights():
    model = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last)
    Reducer([[model.weight]], None, 1)
    model(torch.ones(1, 3, 5, 5)).sum().backward()
    assert model.weight.grad.stride() == model.weight.stride()


def test_a_sparse_gradient_is_refused():
    model = nn.Embedding(4, 2, sparse=True)
    Reducer([[model.weight]], None, 1)
    with pytest.raises(GradweaveError, match="sparse=False"):
        model(torch.tensor([1])).sum().backward()


def test_adding_to_what_is_on_its_way_is_an_error_not_a_wrong_number():
    model = chain()
    reducer_of(model)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(GradweaveError, match="still being averaged"):
        model(torch.ones(2, 3)).sum().backward()
