# mypy: ignore-errors
"""Triton kernels that add up what vectors are made of: rows of a layer's input, or of its output's gradient.

A row is a place of a sample; places come in lines of ``width``. What has taps is added up once for each of them, a row
as often as the tap sees its place. Each program adds up one stretch of rows of some channels.
"""

import triton
import triton.language as tl


@triton.jit
def _row_sum(
    x, first, end, places, width, sample_stride, line_stride, place_stride, channel_stride, channel, present,
    even: tl.constexpr, ahead: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    down = tl.arange(0, block_rows)
    total = tl.zeros([block_rows, block_channels], tl.float32)
    for start in tl.range(first, end, block_rows, num_stages=ahead):
        row = start + down
        if even:
            at = row.to(tl.int64) * place_stride
        else:
            place = row % places
            at = (row // places).to(tl.int64) * sample_stride + (place // width).to(tl.int64) * line_stride
            at += (place % width).to(tl.int64) * place_stride
        mask = (row < end)[:, None] & present[None, :]
        total += tl.load(x + at[:, None] + (channel * channel_stride)[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _patch_sum(
    x, counts, taps, first, end, places, width, sample_stride, line_stride, place_stride, channel_stride, channel,
    present, padded_taps: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    down = tl.arange(0, block_rows)
    tap = tl.arange(0, padded_taps)
    total = tl.zeros([padded_taps, block_channels], tl.float32)
    for start in range(first, end, block_rows):
        row = start + down
        place = row % places
        at = (row // places).to(tl.int64) * sample_stride + (place // width).to(tl.int64) * line_stride
        at += (place % width).to(tl.int64) * place_stride
        mask = (row < end)[:, None] & present[None, :]
        part = tl.load(x + at[:, None] + (channel * channel_stride)[None, :], mask=mask, other=0.0)
        some = (tap < taps)[:, None] & (row < end)[None, :]
        seen = tl.load(counts + tap[:, None] * places + place[None, :], mask=some, other=0.0)
        total = tl.dot(seen, part, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows", "rows_each", "places", "width"])
def sum_one(
    x, counts, out, rows, rows_each, places, width, sample_stride, line_stride, place_stride, channel_stride, channels,
    taps, factor, counted: tl.constexpr, even: tl.constexpr, ahead: tl.constexpr, padded_taps: tl.constexpr,
    block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """The sums of one tensor."""
    stretch = tl.program_id(1)
    first = stretch * rows_each
    end = tl.minimum(first + rows_each, rows)
    channel = (tl.program_id(0) * block_channels + tl.arange(0, block_channels)).to(tl.int64)
    present = channel < channels
    if counted:
        tap = tl.arange(0, padded_taps)
        found = _patch_sum(
            x, counts, taps, first, end, places, width, sample_stride, line_stride, place_stride, channel_stride,
            channel, present, padded_taps, block_rows, block_channels,
        )  # fmt: skip
        at = (stretch * channels + channel)[None, :] * taps + tap[:, None]
        tl.store(out + at, found * factor, mask=present[None, :] & (tap < taps)[:, None])
    else:
        found = _row_sum(
            x, first, end, places, width, sample_stride, line_stride, place_stride, channel_stride, channel, present,
            even, ahead, block_rows, block_channels,
        )  # fmt: skip
        tl.store(out + stretch * channels + channel, found * factor, mask=present)


@triton.jit
def sum_many(
    programs, tensors, addresses, images, out, dtype: tl.constexpr, of_images: tl.constexpr, counted: tl.constexpr,
    channels_are_dense: tl.constexpr, aligned: tl.constexpr, even: tl.constexpr, ahead: tl.constexpr,
    padded_taps: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """The sums of many tensors, found by tables; see :mod:`gradweave.optim.kernels.sums_tables`."""
    number = tl.program_id(0)
    tensor = tl.load(programs + number * 3)
    first_channel = tl.load(programs + number * 3 + 1).to(tl.int32)
    stretch = tl.load(programs + number * 3 + 2).to(tl.int32)
    entry = tensors + tensor * 16
    rows = tl.load(entry).to(tl.int32)
    rows_each = tl.load(entry + 1).to(tl.int32)
    places = tl.load(entry + 2).to(tl.int32)
    width = tl.load(entry + 3).to(tl.int32)
    sample_stride = tl.load(entry + 4)
    line_stride = tl.load(entry + 5)
    place_stride = tl.load(entry + 6)
    channel_stride = 1
    if not channels_are_dense:
        channel_stride = tl.load(entry + 7)
    channels = tl.load(entry + 8).to(tl.int32)
    taps = tl.load(entry + 9).to(tl.int32)
    out += tl.load(entry + 11)
    x = images + tl.load(entry + 12) if of_images else tl.load(addresses + tensor).to(tl.pointer_type(dtype))
    first_channel = tl.multiple_of(first_channel, 16)
    if aligned:
        x = tl.multiple_of(x, 16)
        sample_stride = tl.multiple_of(sample_stride, 8)
        line_stride = tl.multiple_of(line_stride, 8)
        place_stride = tl.multiple_of(place_stride, 8)
        channels = tl.multiple_of(channels, 8)
    first = stretch * rows_each
    end = tl.minimum(first + rows_each, rows)
    channel = first_channel + tl.arange(0, block_channels)
    present = channel < channels
    if counted:
        tap = tl.arange(0, padded_taps)
        counts = tl.load(entry + 10).to(tl.pointer_type(dtype))
        found = _patch_sum(
            x, counts, taps, first, end, places, width, sample_stride, line_stride, place_stride, channel_stride,
            channel, present, padded_taps, block_rows, block_channels,
        )  # fmt: skip
        at = (stretch * channels + channel)[None, :] * taps + tap[:, None]
        tl.store(out + at, found, mask=present[None, :] & (tap < taps)[:, None])
    else:
        found = _row_sum(
            x, first, end, places, width, sample_stride, line_stride, place_stride, channel_stride, channel, present,
            even, ahead, block_rows, block_channels,
        )  # fmt: skip
        tl.store(out + stretch * channels + channel, found, mask=present)


@triton.jit
def fold(
    programs, tensors, addresses, images, dtype: tl.constexpr, aligned: tl.constexpr, ahead: tl.constexpr,
    at_once: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Adds up samples, each as it lies in memory: what is left of a tensor is few images."""
    number = tl.program_id(0)
    tensor = tl.load(programs + number * 3)
    first = tl.load(programs + number * 3 + 1).to(tl.int32)
    stretch = tl.load(programs + number * 3 + 2)
    entry = tensors + tensor * 16
    stride = tl.load(entry + 4)
    out = images + tl.load(entry + 12)
    samples = tl.load(entry + 13)
    each = tl.load(entry + 14)
    size = tl.load(entry + 15)
    x = tl.load(addresses + tensor).to(tl.pointer_type(dtype))
    begin = stretch * each
    count = tl.minimum(each, samples - begin).to(tl.int32)
    x += begin * stride
    if aligned:
        first = tl.multiple_of(first, 16)
        stride = tl.multiple_of(stride, 8)
        x = tl.multiple_of(x, 16)
        size = tl.multiple_of(size, 8)
    at = first + tl.arange(0, block)
    inside = at < size
    down = tl.arange(0, at_once)
    total = tl.zeros([at_once, block], tl.float32)
    for start in tl.range(0, count, at_once, num_stages=ahead):
        mask = (start + down < count)[:, None] & inside[None, :]
        place = (start + down).to(tl.int64)[:, None] * stride + at[None, :]
        total += tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + stretch * size + at, tl.sum(total, 0), mask=inside)


@triton.jit
def add_to_records(programs, parts, caught, at_once: tl.constexpr, block: tl.constexpr):
    """Adds stretches up, and to the records of their layers: each program some columns of one sum."""
    number = tl.program_id(0)
    part = parts + tl.load(programs + number * 2) * 8
    first = tl.load(programs + number * 2 + 1).to(tl.int32)
    source = tl.load(caught + tl.load(part)).to(tl.pointer_type(tl.float32))
    record = tl.load(part + 1).to(tl.pointer_type(tl.float32))
    stretches = tl.load(part + 2).to(tl.int32)
    columns = tl.load(part + 3).to(tl.int32)
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
