import copy
import pickle

import pytest
import torch
from torch import nn

from _runtime.deferred.comparison import same
from gradweave._runtime.deferred.pending_parameter import (
    PendingParameter,
    accumulate,
    make_pending,
    restore,
    shown_gradient,
)


def pending(shown=None):
    param = nn.Parameter(torch.zeros(3))
    asked = []

    def update(p):
        asked.append(p)
        restore(p)
        with torch.no_grad():
            p.fill_(2.0)

    make_pending(param, update, shown)
    return param, asked


@pytest.mark.parametrize(
    "use",
    [
        torch.sum, torch.Tensor.tolist, torch.Tensor.detach, repr, copy.deepcopy, pickle.dumps, nn.Parameter,
        lambda p: p.data, lambda p: p.shape, lambda p: p + 1, lambda p: torch.stack([p]), lambda p: {"key": p * 2},
    ],
)  # fmt: skip
def test_every_use_updates_it_first_and_once(use):
    param, asked = pending()
    use(param)
    use(param)
    assert [p is param for p in asked] == [True]
    assert type(param) is nn.Parameter
    assert param.tolist() == [2.0] * 3
    assert vars(param) == {}


def test_what_it_is_can_be_asked_without_an_update():
    param, asked = pending()
    assert isinstance(param, nn.Parameter)
    assert (param.dtype, param.device.type, param.requires_grad, param.is_leaf) == (torch.float32, "cpu", True, True)
    assert type(param) is PendingParameter
    assert asked == []


def test_parameters_of_several_owners_are_each_updated_by_their_own():
    (one, asked_of_one), (other, asked_of_other) = pending(), pending()
    assert torch.add(one, other).tolist() == [4.0] * 3
    assert len(asked_of_one) == len(asked_of_other) == 1


def test_its_gradient_is_shown_and_cleared_without_an_update():
    gradient = torch.ones(3)
    param, asked = pending(gradient)
    assert param.grad is gradient
    param.grad = None
    assert param.grad is None
    assert shown_gradient(param) is None
    assert asked == []


def test_what_a_backward_accumulates_is_added_to_what_it_shows():
    param, _ = pending(torch.ones(3))
    accumulate(param, torch.full((3,), 4.0))
    assert param.grad.tolist() == [1.0] * 3
    restore(param)
    assert param.grad.tolist() == [5.0] * 3


def test_a_parameter_made_from_the_class_of_a_pending_one():
    def make_another(i, model, *_):
        made = type(model.head.weight)(torch.ones(2, 2))
        assert type(made) is nn.Parameter
        return made.sum().item()

    same(make_another)


def test_a_parameter_made_from_a_pending_one_shares_its_memory():
    def tie(i, model, optimizer, x):
        tied = nn.Parameter(model.head.weight)
        assert type(tied) is nn.Parameter
        assert tied.is_leaf
        assert tied.data_ptr() == model.head.weight.data_ptr()
        assert type(model.head.weight.detach()) is torch.Tensor
        return tied.tolist()

    same(tie)


def test_a_pending_weight_that_is_swapped_for_another():
    def swap(i, model, optimizer, x):
        other = nn.Parameter(torch.ones_like(model.inner.weight))
        if i == 4:
            torch.utils.swap_tensors(model.inner.weight, other)
        return other.detach().tolist()

    same(swap)
