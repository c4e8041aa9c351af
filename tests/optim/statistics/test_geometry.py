"""Sums over the places of a layer, against explicit patches and weight gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from optim.statistics.collected import parts, single


@given(st.integers(1, 3), st.lists(st.integers(1, 3), max_size=3), st.booleans())
def test_linear_layers_of_any_leading_dimensions(inputs, leading, bias):
    module = nn.Linear(inputs, 4, bias=bias, dtype=torch.float64)
    x = torch.randn(*leading, inputs, dtype=torch.float64)
    layer, g = single(module, x)
    a, count, b = parts(layer)
    assert count == x.numel() // inputs
    assert torch.allclose(a[0], x.reshape(-1, inputs).sum(0))
    assert torch.allclose(b[0], g.reshape(-1, 4).sum(0))
    if bias:
        assert torch.allclose(b[0], module.bias.grad)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.sampled_from([1, 2, 4]),
       st.integers(5, 8))  # fmt: skip
def test_convolutions_with_groups_against_unfolded_patches(kernel, stride, dilation, padding, groups, size):
    assume(size + 2 * padding >= dilation * (kernel - 1) + 1)
    module = nn.Conv2d(4, 8, kernel, stride, padding, dilation, groups).double()
    x = torch.randn(3, 4, size, size + 1, dtype=torch.float64)
    layer, g = single(module, x)
    a, count, b = parts(layer)
    patches = F.unfold(x, kernel, dilation, padding, stride)
    assert count == patches.shape[0] * patches.shape[2]
    assert torch.allclose(a, patches.sum((0, 2)).view(groups, -1))
    assert torch.allclose(b, g.sum((0, 2, 3)).view(groups, -1))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_are_products_of_inputs_and_patches_of_outputs(dimensions, groups):
    """With one sample of one place, the gradient is the outer product of both vectors exactly."""
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1]
    module = kind(4, 6, 3, stride=2, padding=1, output_padding=1, dilation=2, groups=groups).double()
    layer, _ = single(module, torch.randn(1, 4, *[1] * dimensions, dtype=torch.float64))
    a, count, b = parts(layer)
    assert count == 1
    product = (a[:, :, None] * b[:, None]).reshape(module.weight.shape)
    assert torch.allclose(product, module.weight.grad)
    assert layer.bias is None
    x = torch.randn(2, 4, *(3, 4, 2)[:dimensions], dtype=torch.float64)
    layer, g = single(module, x)
    a, count, b = parts(layer)
    assert count == x.numel() // 4
    assert torch.allclose(a.flatten(), x.sum((0, *range(2, x.dim()))))
    module.zero_grad()
    module(torch.ones_like(x)).backward(g)
    patches = module.weight.grad.view(groups, 4 // groups, -1)
    assert torch.allclose(b[:, None].expand_as(patches), patches)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_one_and_three_dimensions(dimensions):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    module = kind(2, 3, 3, stride=2, padding=1).double()
    layer, g = single(module, torch.randn(1, 2, *(2, 1, 2)[:dimensions], dtype=torch.float64))
    a, count, b = parts(layer)
    assert count == 1
    assert torch.allclose((b[0, :, None] * a[0]).view(module.weight.shape), module.weight.grad)
    assert torch.allclose(b[0], g.flatten(2).sum((0, 2)))


def test_images_without_a_batch_dimension():
    module = nn.Conv2d(4, 8, 3)
    x = torch.randn(4, 6, 6)
    one = single(module, x)[0].tap.record
    assert torch.allclose(one, single(module, x[None])[0].tap.record)
