"""Sums over the places of a tensor on a GPU, by which vectors are made: what is added up, and the launch for it.

A kernel adds up stretches of rows, and leaves the stretches to whoever uses them: nothing is added in an order that
could change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib import import_module
from operator import mul
from typing import Any

import torch

from gradweave.optim.kernels import step as fused
from gradweave.optim.statistics.geometry import LINEAR, Layout
from gradweave.optim.statistics.patches import Window

Launcher = Callable[[torch.Tensor, torch.Tensor], Any]
"""Adds up a tensor; its second argument gets one sum behind the other."""

_PROGRAMS = 256
_FEWEST_ROWS = 64
_MOST_TAPS = 64
_MOST_COUNTS = 1 << 23
_TILE = 8192
AHEAD = 3
"""How many reads of a loop are on their way at once."""
_MOST_ROWS = (1 << 31) - _TILE
_EXACT = 256
"""Up to here whole numbers are exact in bfloat16."""
_NARROW = 16


@dataclass(frozen=True)
class Rows:
    """The rows of one tensor: places of its samples, each with channels.

    Attributes:
        count: How many.
        places: Of a sample.
        width: Places of a line.
        strides: Of samples, lines, places and channels.
        channels: Of a row.
        taps: That see each place, as often as ``counts`` says; 1 where every place counts once.
        counts: Taps by places.
        whole: Whether each sample is in one piece of memory.
    """

    count: int
    places: int
    width: int
    strides: tuple[int, int, int, int]
    channels: int
    taps: int = 1
    counts: torch.Tensor | None = None
    whole: bool = False

    @property
    def columns(self) -> int:
        """How long a sum is."""
        return self.channels * self.taps

    @property
    def padded_taps(self) -> int:
        """As many as a kernel has room for."""
        return max(power_of_two(self.taps), 16)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and channels that a program reads at once."""
        widest = 64 if self.counts is not None else 128
        channels = min(max(power_of_two(self.channels), 16), widest)
        if self.counts is None and self.strides[3] != 1:
            channels = 16
        rows = _TILE // channels
        if self.counts is not None and (self.counts.dtype is torch.float32 or self.padded_taps > 16):
            rows = min(rows, 64)
        return rows, channels

    @property
    def warps(self) -> int:
        """Of a program."""
        return 8 if self.counts is None else 4

    def stretches(self, programs: int = _PROGRAMS) -> int:
        """How many sums are made, so that there are some number of programs; whatever the order in memory."""
        blocks = -(-self.channels // (128 if self.counts is None else 64))
        return -(-self.count // self.each(max(programs // blocks, 1)))

    def each(self, stretches: int) -> int:
        """Rows of a stretch; programs read many at once."""
        return -(-self.count // (stretches * _FEWEST_ROWS)) * _FEWEST_ROWS

    @property
    def samples(self) -> int:
        """How many samples the rows are of."""
        return self.count // self.places

    @property
    def are_even(self) -> bool:
        """Whether from each row to the next it is as far as from others."""
        samples, lines, places, _ = self.strides
        return (self.samples == 1 or samples == self.places * places) and (
            self.width == self.places or lines == self.width * places
        )


def power_of_two(number: int) -> int:
    """The next one that is not less."""
    return 1 << (number - 1).bit_length()


def rows_of(x: torch.Tensor, layout: Layout, samples: int | None, windows: Sequence[Window] = ()) -> Rows | None:
    """The rows of a layer's input or of its output's gradient; None if they are in no order that kernels know.

    Args:
        x: The tensor.
        layout: Of the layer.
        samples: How many of the first to take.
        windows: Of the patches that are added up; none for places as they are.
    """
    x = x if x.dim() >= 2 + len(layout.windows) else x.unsqueeze(0)
    sizes, strides = list(x.shape), list(x.stride())
    channel = -1 if layout.kind == LINEAR else 1
    channels, channel_stride = sizes.pop(channel), strides.pop(channel)
    sample_count = sizes[0] if samples is None else min(samples, sizes[0])
    seen_once = all(window.kernel == 1 and window.before == window.after == 0 for window in windows)
    if seen_once:
        for index, window in enumerate(windows, 1):
            sizes[index], strides[index] = window.places(sizes[index]), strides[index] * window.stride
    lines = _lines(sizes[1:], strides[1:])
    places = reduce(mul, sizes[1:], 1)
    if lines is None or not 0 < sample_count * places < _MOST_ROWS:
        return None
    width, line_stride, place_stride = lines
    strides_of = (strides[0], line_stride, place_stride, channel_stride)
    rows = Rows(sample_count * places, places, width, strides_of, channels, whole=_are_whole(x))
    if seen_once:
        return rows
    taps = reduce(mul, (window.kernel for window in windows), 1)
    if taps > _MOST_TAPS or taps * places > _MOST_COUNTS or fused.is_capturing(x.device):
        return None
    counts = _counts(windows, sizes[1:])
    if counts.max() > _EXACT:
        return None
    return replace(rows, taps=taps, counts=counts.to(x.device, x.dtype))


def _lines(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int] | None:
    """Places as lines of one length: their width, and the strides of lines and of places in them."""
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
    (width, place_stride), (_, line_stride) = merged
    return width, line_stride, place_stride


def _counts(windows: Sequence[Window], sizes: Sequence[int]) -> torch.Tensor:
    """How often each tap sees each place: taps by places."""
    whole = torch.ones(1, 1, dtype=torch.float32)
    for window, size in zip(windows, sizes, strict=True):
        whole = torch.kron(whole, window.counts(size, window.places(size), whole))
    return whole.contiguous()


def launcher(rows: Rows, stretches: int, factor: float = 1.0) -> Launcher:
    """What adds up tensors of such rows."""
    kernels = import_module("gradweave.optim.kernels.sums_triton")
    block_rows, block_channels = rows.block
    each = rows.each(stretches)
    counted = rows.counts is not None
    rest = (rows.count, each, rows.places, rows.width, *rows.strides, rows.channels, rows.taps, factor,
            counted, rows.are_even and not counted, AHEAD, rows.padded_taps, block_rows, block_channels)  # fmt: skip
    run = kernels.sum_one[-(-rows.channels // block_channels), stretches]
    counts, warps = rows.counts, rows.warps
    return lambda x, out: run(x, x if counts is None else counts, out, *rest, num_warps=warps)


def _are_whole(x: torch.Tensor) -> bool:
    """Whether each sample of a tensor is in one piece of memory."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride()[1:], x.shape[1:], strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def is_narrow(rows: Rows) -> bool:
    """Whether patches have so few channels, or so many taps, that samples are better added up first."""
    return rows.counts is not None and rows.whole and (rows.channels < _NARROW or rows.padded_taps > _NARROW)


def images_of(rows: Rows, parts: int) -> Rows:
    """The rows of sums of samples, which are as samples are, one behind the other."""
    counts = None if rows.counts is None else rows.counts.float()
    strides = (rows.places * rows.channels, *rows.strides[1:])
    return replace(rows, count=parts * rows.places, strides=strides, counts=counts)


def samples_first(rows: Rows, stretches: int) -> Launcher:
    """What adds up tensors of such rows in two launches: samples, and then the patches of their sum."""
    size = rows.places * rows.channels
    samples = Rows(rows.samples, 1, 1, (rows.strides[0], 0, 0, 1), size)
    add_samples = launcher(samples, 1)
    add_places = launcher(images_of(rows, 1), stretches)

    def add(x: torch.Tensor, out: torch.Tensor) -> None:
        image = torch.empty(size, dtype=torch.float32, device=x.device)
        add_samples(x, image)
        add_places(image, out)

    return add
