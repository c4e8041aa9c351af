"""Rows of tensors: what kernels would add up is what the layers' geometry says."""

import pytest
import torch
from torch import nn

from gradweave.optim.kernels.sums import image_layout, prefers_two_stages, row_layout
from gradweave.optim.statistics.geometry import CONVOLUTION, layout_of


def sum_by_rows(rows, x):
    """Sums of rows as kernels find them in memory: channels, and taps of each channel."""
    row, channel = torch.arange(rows.count), torch.arange(rows.channels)
    place = row % rows.places
    at = row // rows.places * rows.strides.sample + place // rows.line_length * rows.strides.line
    at = at + place % rows.line_length * rows.strides.place
    if rows.is_evenly_spaced:
        assert torch.equal(at, row * rows.strides.place)
    memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    found = memory[x.storage_offset() + at[:, None] + channel * rows.strides.channel]
    counts = torch.ones(1, rows.places) if rows.tap_counts is None else rows.tap_counts
    return (counts[:, place] @ found).t().flatten()


def check(layer, x, samples=None):
    layout = layout_of(layer)
    windows = layout.windows if layout.kind == CONVOLUTION else ()
    rows = row_layout(x, layout, samples, windows)
    expected, _ = layout.input_sums(x, samples, None)
    channels = x.shape[-1 if isinstance(layer, nn.Linear) else -len(layer.kernel_size) - 1]
    assert rows.columns == expected.numel() == channels * rows.taps
    torch.testing.assert_close(sum_by_rows(rows, x), expected, rtol=1e-4, atol=1e-4)
    return rows


@pytest.mark.parametrize("samples", [None, 2])
@pytest.mark.parametrize("shape", [(5, 6), (3, 4, 6), (2, 3, 4, 6)])
def test_rows_of_linear_layers(shape, samples):
    rows = check(nn.Linear(6, 2), torch.randn(shape), samples)
    assert rows.is_evenly_spaced == (rows.places > 1)


def test_rows_in_any_order_in_memory():
    layer = nn.Linear(6, 2)
    assert not check(layer, torch.randn(4, 6, 5).transpose(1, 2)).is_evenly_spaced
    check(layer, torch.randn(9, 5, 12)[::2, 1:4, ::2])
    assert row_layout(torch.randn(4, 8, 8, 8, 6)[:, ::2, ::3, ::2], layout_of(layer), None) is None


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect"])
@pytest.mark.parametrize("settings", [(3, 2, 1, 1), (2, 1, 0, 2), ((1, 3), 1, (0, 1), 1)])
def test_rows_of_patches(order, mode, settings):
    layer = nn.Conv2d(3, 4, *settings, padding_mode=mode)
    x = torch.randn(4, 3, 7, 9).contiguous(memory_format=order)
    rows = check(layer, x)
    assert rows.has_dense_samples
    assert prefers_two_stages(rows)


def test_places_that_a_stride_leaves_out_need_no_counts():
    rows = check(nn.Conv2d(3, 4, 1, 2), torch.randn(2, 3, 7, 9))
    assert rows.tap_counts is None
    assert rows.places == 4 * 5


def test_rows_of_transposed_convolutions_are_places_of_the_input():
    assert check(nn.ConvTranspose2d(4, 6, 3, 2), torch.randn(3, 4, 5, 4)).taps == 1


def test_counts_that_are_not_exact_in_half_precision_are_not_for_kernels():
    layer = nn.Conv1d(2, 2, 1, padding=300, padding_mode="replicate")
    layout = layout_of(layer)
    assert row_layout(torch.randn(1, 2, 8), layout, None, layout.windows) is None


def test_images_have_the_rows_of_samples():
    layer = nn.Conv2d(3, 4, 3)
    x = torch.randn(8, 3, 6, 5)
    rows = check(layer, x)
    image = image_layout(rows, 1)
    torch.testing.assert_close(sum_by_rows(image, x.sum(0, keepdim=True)), sum_by_rows(rows, x))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 5000, 100_000])
@pytest.mark.parametrize("channels", [1, 16, 700])
def test_splits_are_none_of_them_empty_and_have_all_rows(count, channels):
    rows = row_layout(torch.empty(count, channels, device="meta"), layout_of(nn.Linear(channels, 1)), None)
    for programs in (1, 128, 256):
        splits = rows.splits(programs)
        per_split = rows.rows_per_split(splits)
        assert per_split % 64 == 0
        assert (splits - 1) * per_split < count <= splits * per_split
