"""Copies of a weight and its bias in the precisions in which calls use them."""

import pytest
import torch

from gradweave._runtime.split_calls.weights import WeightCopies


@pytest.mark.parametrize("is_leaf", [True, False])
def test_copies_in_low_precision_are_shared_where_autocast_shares_them(is_leaf):
    copies = WeightCopies(torch.ones(2, 3), torch.ones(2), is_leaf=is_leaf)
    with torch.autocast("cpu", torch.bfloat16):
        one, other = copies.in_precision(torch.bfloat16), copies.in_precision(torch.bfloat16)
    assert (one[0] is other[0]) == is_leaf
    assert one[0].dtype is one[1].dtype is torch.bfloat16
    assert copies.in_precision(torch.float32) == (copies.weight, copies.bias)


def test_a_layer_without_a_bias():
    assert WeightCopies(torch.ones(2, 3), None, is_leaf=True).in_precision(torch.bfloat16)[1] is None


def test_a_weight_in_other_memory_is_another_one():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    copies = WeightCopies(weight.detach(), None, is_leaf=True)
    assert copies.stands_for(weight)
    assert not copies.stands_for(weight.detach().t()[:1])
    weight.data = torch.ones(2, 2)
    assert not copies.stands_for(weight)
