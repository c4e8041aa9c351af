"""Flat messages of gradients, in the order of memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradweave._runtime.peers.gradient_messages import in_memory_order, laid_out_like


@given(st.lists(st.integers(1, 4), max_size=4), st.randoms(use_true_random=False))
def test_a_dense_tensor_comes_back_as_it_was_laid_out(shape, random):
    order = random.sample(range(len(shape)), len(shape))
    memory = torch.arange(torch.Size([shape[d] for d in order]).numel(), dtype=torch.float32)
    tensor = memory.view([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    assert list(tensor.shape) == shape
    flat = in_memory_order(tensor)
    assert torch.equal(flat, memory)
    assert flat.data_ptr() == tensor.data_ptr()
    again = laid_out_like(flat.clone(), tensor)
    assert torch.equal(again, tensor)
    assert again.stride() == tensor.stride() or 1 in shape


@pytest.mark.parametrize("make", [lambda: torch.arange(12.0).view(4, 3)[:, :2], lambda: torch.ones(3, 1).expand(3, 4)])
def test_a_tensor_with_gaps_travels_in_the_order_of_its_elements(make):
    tensor = make()
    flat = in_memory_order(tensor)
    assert torch.equal(flat, tensor.reshape(-1))
    assert torch.equal(laid_out_like(flat, tensor), tensor)


def test_channels_last():
    tensor = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    flat = in_memory_order(tensor)
    assert torch.equal(flat, tensor.permute(0, 2, 3, 1).reshape(-1))
    assert laid_out_like(flat, tensor).stride() == tensor.stride()
