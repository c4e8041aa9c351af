# mypy: ignore-errors
"""Triton kernels that add up what vectors are made of: rows of a layer's input, or of its output's gradient."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "rows_each", "places"])
def sum_rows(
    x, out, rows, rows_each, places, sample_stride, place_stride, channel_stride, channels, factor,
    block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Of some channels, the sum over one stretch of rows; a row is a place of a sample."""
    stretch = tl.program_id(1)
    channel = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    present = channel < channels
    end = tl.minimum(stretch * rows_each + rows_each, rows)
    down = tl.arange(0, block_rows)
    total = tl.zeros([block_rows, block_channels], tl.float32)
    for start in range(stretch * rows_each, end, block_rows):
        row = start + down
        at = (row // places).to(tl.int64) * sample_stride + (row % places).to(tl.int64) * place_stride
        mask = (row < end)[:, None] & present[None, :]
        total += tl.load(x + at[:, None] + (channel * channel_stride)[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + stretch * channels + channel, tl.sum(total, 0) * factor, mask=present)


@triton.jit(do_not_specialize=["rows", "rows_each", "places"])
def sum_patches(
    x, counts, out, rows, rows_each, places, sample_stride, place_stride, channel_stride, channels, factor,
    taps: tl.constexpr, padded_taps: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Of some channels and every tap of a kernel, the same sum, of rows as often as the tap sees their place."""
    stretch = tl.program_id(1)
    channel = tl.program_id(0) * block_channels + tl.arange(0, block_channels)
    present = channel < channels
    end = tl.minimum(stretch * rows_each + rows_each, rows)
    down = tl.arange(0, block_rows)
    tap = tl.arange(0, padded_taps)
    total = tl.zeros([padded_taps, block_channels], tl.float32)
    for start in range(stretch * rows_each, end, block_rows):
        row = start + down
        place = row % places
        at = (row // places).to(tl.int64) * sample_stride + place.to(tl.int64) * place_stride
        mask = (row < end)[:, None] & present[None, :]
        part = tl.load(x + at[:, None] + (channel * channel_stride)[None, :], mask=mask, other=0.0)
        some = (tap < taps)[:, None] & (row < end)[None, :]
        seen = tl.load(counts + tap[:, None] * places + place[None, :], mask=some, other=0.0)
        total = tl.dot(seen, part, total, input_precision="ieee")
    at = (stretch * channels + channel)[None, :] * taps + tap[:, None]
    tl.store(out + at, total * factor, mask=present[None, :] & (tap < taps)[:, None])


@triton.jit
def add_to_records(programs, parts, caught, records, at_once: tl.constexpr, block: tl.constexpr):
    """Adds stretches up, and to the records of their layers: each program some columns of one sum."""
    number = tl.program_id(0)
    part = parts + tl.load(programs + number * 2) * 8
    first = tl.load(programs + number * 2 + 1).to(tl.int32)
    layer = tl.load(part)
    source = tl.load(caught + layer).to(tl.pointer_type(tl.float32)) + tl.load(part + 1)
    stretches = tl.load(part + 2).to(tl.int32)
    columns = tl.load(part + 3).to(tl.int32)
    record = tl.load(records + layer).to(tl.pointer_type(tl.float32))
    begin = tl.load(part + 4)
    count = tl.load(part + 5)
    count_at = tl.load(part + 6)
    column = first + tl.arange(0, block)
    present = column < columns
    down = tl.arange(0, at_once)
    total = tl.zeros([at_once, block], tl.float32)
    for start in range(0, stretches, at_once):
        mask = (start + down < stretches)[:, None] & present[None, :]
        total += tl.load(source + (start + down)[:, None] * columns + column[None, :], mask=mask, other=0.0)
    place = record + begin + column
    tl.store(place, tl.load(place, mask=present, other=0.0) + tl.sum(total, 0), mask=present)
    counts = (first == 0) & (count > 0)
    before = tl.load(record + count_at, mask=counts, other=0.0)
    tl.store(record + count_at, before + count.to(tl.float32), mask=counts)
