"""Sums over the places of a tensor on a GPU, of which vectors are made: what is added up, and launches for one tensor.

A tensor is seen as rows of channels, one row for each place of a sample. A kernel divides the rows into *splits*, each
added up by a program of its own, and writes one sum per split. The next kernel adds these up: without atomics and in a
fixed order, so that sums are the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import mul
from typing import NamedTuple

import torch

from gradweave.optim.kernels.launch import is_capturing, triton_module
from gradweave.optim.statistics.geometry import LINEAR, Layout
from gradweave.optim.statistics.patches import Window

SumFunction = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds up a tensor; writes the sums of its splits into the second argument, one after another."""

NUM_STAGES = 3
"""Number of a loop's reads that are under way at once."""
_PROGRAMS = 256
"""About as many programs as a launch is to have."""
_ROWS_MULTIPLE = 64
"""Rows of a split are a multiple of this."""
_MAX_TAPS = 64
_MAX_TAP_COUNTS = 1 << 23
_TILE_ELEMENTS = 8192
_MAX_ROWS = (1 << 31) - _TILE_ELEMENTS
"""Rows, and those that masks cut off, are counted in int32."""
_MAX_EXACT = 256
"""Up to here whole numbers are exact in bfloat16."""
_FEW_CHANNELS = 16
"""Least size of a matrix product's dimension in a kernel; fewer channels, or taps, are padded."""


class Strides(NamedTuple):
    """Strides of a tensor's places, in elements."""

    sample: int
    line: int
    place: int
    channel: int


@dataclass(frozen=True)
class RowLayout:
    """The rows of one tensor: places of its samples, which come in lines of one length, each with channels.

    Attributes:
        count: Number of rows.
        places: Places of a sample.
        line_length: Places of a line.
        strides: Where they are.
        channels: Channels of a row.
        taps: Taps of a convolution's kernel that see each place, as often as ``tap_counts`` says; 1 where every place
            counts once.
        tap_counts: How often each tap sees each place: taps by places; None where every place counts once.
        has_dense_samples: Whether each sample is in one piece of memory.
    """

    count: int
    places: int
    line_length: int
    strides: Strides
    channels: int
    taps: int = 1
    tap_counts: torch.Tensor | None = None
    has_dense_samples: bool = False

    @property
    def columns(self) -> int:
        """Length of a sum."""
        return self.channels * self.taps

    @property
    def padded_taps(self) -> int:
        """Size of a kernel's dimension of taps."""
        return max(next_power_of_two(self.taps), _FEW_CHANNELS)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Rows and channels that a program reads at once."""
        widest = 64 if self.tap_counts is not None else 128
        channels = min(max(next_power_of_two(self.channels), _FEW_CHANNELS), widest)
        if self.tap_counts is None and self.strides.channel != 1:
            channels = _FEW_CHANNELS  # neighbours in memory are rows then: more of them at once
        rows = _TILE_ELEMENTS // channels
        # Operands of the matrix product with counts are larger then: fewer rows at once.
        if self.tap_counts is not None and (self.tap_counts.dtype is torch.float32 or self.padded_taps > 16):
            rows = min(rows, 64)
        return rows, channels

    @property
    def num_warps(self) -> int:
        """Warps of a program."""
        return 8 if self.tap_counts is None else 4

    def splits(self, programs: int = _PROGRAMS) -> int:
        """Return the number of splits that gives about a number of programs; the same for any order in memory."""
        blocks = -(-self.channels // (128 if self.tap_counts is None else 64))
        return -(-self.count // self.rows_per_split(max(programs // blocks, 1)))

    def rows_per_split(self, splits: int) -> int:
        """Return the rows of a split."""
        return -(-self.count // (splits * _ROWS_MULTIPLE)) * _ROWS_MULTIPLE

    @property
    def samples(self) -> int:
        """Number of samples that the rows are of."""
        return self.count // self.places

    @property
    def is_evenly_spaced(self) -> bool:
        """Whether each row is as far from the next one as any other, so that a kernel need not divide."""
        strides = self.strides
        return (self.samples == 1 or strides.sample == self.places * strides.place) and (
            self.line_length == self.places or strides.line == self.line_length * strides.place
        )


def next_power_of_two(number: int) -> int:
    """Return the least power of two that is not less than a number."""
    return 1 << (number - 1).bit_length()


def row_layout(
    x: torch.Tensor, layout: Layout, samples: int | None, windows: Sequence[Window] = ()
) -> RowLayout | None:
    """Return the rows of a layer's input or of its output's gradient; None if kernels do not know their order.

    Args:
        x: The tensor.
        layout: Layout of the layer.
        samples: Number of leading samples; None for all.
        windows: Windows of the patches that are added up; none for places as they are.
    """
    x = x if x.dim() >= 2 + len(layout.windows) else x.unsqueeze(0)
    sizes, strides = list(x.shape), list(x.stride())
    channel = -1 if layout.kind == LINEAR else 1
    channels, channel_stride = sizes.pop(channel), strides.pop(channel)
    sample_count = sizes[0] if samples is None else min(samples, sizes[0])
    # With one tap and no padding no place is seen twice: a stride just leaves some out.
    seen_once = all(window.kernel == 1 and window.before == window.after == 0 for window in windows)
    if seen_once:
        for index, window in enumerate(windows, 1):
            sizes[index], strides[index] = window.places(sizes[index]), strides[index] * window.stride
    lines = _lines(sizes[1:], strides[1:])
    places = reduce(mul, sizes[1:], 1)
    if lines is None or not 0 < sample_count * places < _MAX_ROWS:
        return None
    line_length, line_stride, place_stride = lines
    rows = RowLayout(
        count=sample_count * places,
        places=places,
        line_length=line_length,
        strides=Strides(strides[0], line_stride, place_stride, channel_stride),
        channels=channels,
        has_dense_samples=_has_dense_samples(x),
    )
    if seen_once:
        return rows
    taps = reduce(mul, (window.kernel for window in windows), 1)
    # Counts are made on the host, and their copy to the device is not allowed during capture.
    if taps > _MAX_TAPS or taps * places > _MAX_TAP_COUNTS or is_capturing(x.device):
        return None
    tap_counts = _tap_counts(windows, sizes[1:])
    if tap_counts.max() > _MAX_EXACT:
        return None
    return replace(rows, taps=taps, tap_counts=tap_counts.to(x.device, x.dtype))


def _lines(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int] | None:
    """Return places as lines of one length: this length, and the strides of lines and of places in them."""
    merged: list[list[int]] = []
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1][0] *= size
        else:
            merged.append([size, stride])
    if len(merged) > 2:
        return None
    merged += [[1, 0]] * (2 - len(merged))
    (length, place_stride), (_, line_stride) = merged
    return length, line_stride, place_stride


def _tap_counts(windows: Sequence[Window], sizes: Sequence[int]) -> torch.Tensor:
    """Return how often each tap sees each place: taps by places."""
    whole = torch.ones(1, 1, dtype=torch.float32)
    for window, size in zip(windows, sizes, strict=True):
        whole = torch.kron(whole, window.counts(size, window.places(size), whole))
    return whole.contiguous()


def _has_dense_samples(x: torch.Tensor) -> bool:
    """Return whether each sample of a tensor is in one piece of memory, in any order."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride()[1:], x.shape[1:], strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def make_sum(rows: RowLayout, splits: int, factor: float = 1.0) -> SumFunction:
    """Return a function that adds up tensors with such rows in one launch.

    Args:
        rows: Rows of the tensors.
        splits: Number of splits.
        factor: What sums are multiplied by.
    """
    block_rows, block_channels = rows.block_shape
    counts, warps = rows.tap_counts, rows.num_warps
    is_counted = counts is not None
    arguments = (
        rows.count, rows.rows_per_split(splits), rows.places, rows.line_length, *rows.strides, rows.channels,
        rows.taps, factor, is_counted, rows.is_evenly_spaced and not is_counted, NUM_STAGES, rows.padded_taps,
        block_rows, block_channels,
    )  # fmt: skip
    launch = triton_module("sums_triton").sum_one[-(-rows.channels // block_channels), splits]

    def add_up(x: torch.Tensor, out: torch.Tensor) -> None:
        launch(x, x if counts is None else counts, out, *arguments, num_warps=warps)

    return add_up


def make_two_stage_sum(rows: RowLayout, splits: int) -> SumFunction:
    """Return a function that adds up such tensors in two launches: samples, and then the patches of their sum."""
    size = rows.places * rows.channels
    samples = RowLayout(rows.samples, 1, 1, Strides(rows.strides.sample, 0, 0, 1), size)
    add_samples = make_sum(samples, 1)
    add_patches = make_sum(image_layout(rows, 1), splits)

    def add_up(x: torch.Tensor, out: torch.Tensor) -> None:
        image = torch.empty(size, dtype=torch.float32, device=x.device)
        add_samples(x, image)
        add_patches(image, out)

    return add_up


def prefers_two_stages(rows: RowLayout) -> bool:
    """Return whether patches have so few channels, or so many taps, that samples are better added up first."""
    is_costly = rows.channels < _FEW_CHANNELS or rows.padded_taps > _FEW_CHANNELS
    return rows.tap_counts is not None and rows.has_dense_samples and is_costly


def image_layout(rows: RowLayout, images: int) -> RowLayout:
    """Return the rows of images, which are sums of samples, in float32, and lie in memory as samples do, densely."""
    counts = None if rows.tap_counts is None else rows.tap_counts.float()
    strides = rows.strides._replace(sample=rows.places * rows.channels)
    return replace(rows, count=images * rows.places, strides=strides, tap_counts=counts)
