"""Sums of patches against patches that are made."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from gradweave.optim.statistics.patches import patch_sum, windows_of


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(1, 9), st.integers(1, 9))
def test_two_dimensions_match_unfold(kernel, stride, dilation, padding, height, width):
    assume(min(height, width) + 2 * padding >= dilation * (kernel - 1) + 1)
    module = nn.Conv2d(3, 1, kernel, stride, padding, dilation)
    x = torch.randn(2, 3, height, width, dtype=torch.float64)
    expected = F.unfold(x, kernel, dilation, padding, stride).sum((0, 2))
    assert torch.allclose(patch_sum(x.sum(0), windows_of(module)).flatten(), expected)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_every_padding_gives_the_weight_gradient_of_an_output_of_ones(mode, dimensions):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    module = kind(2, 1, 3, stride=2, padding=2, dilation=1, padding_mode=mode, bias=False, dtype=torch.float64)
    x = torch.randn(2, 2, *(5, 6, 4)[:dimensions], dtype=torch.float64)
    module(x).sum().backward()
    assert torch.allclose(patch_sum(x.sum(0), windows_of(module)), module.weight.grad[0])


@pytest.mark.filterwarnings("ignore:Using padding=")
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_named_paddings(padding):
    module = nn.Conv2d(2, 1, (2, 3), padding=padding, dilation=(1, 2), bias=False, dtype=torch.float64)
    x = torch.randn(2, 2, 7, 7, dtype=torch.float64)
    module(x).sum().backward()
    assert torch.allclose(patch_sum(x.sum(0), windows_of(module)), module.weight.grad[0])
