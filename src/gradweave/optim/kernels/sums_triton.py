# mypy: ignore-errors
"""Triton kernels that add up what vectors are made of: rows of a layer's input, or of its output's gradient.

A row is a place of a sample; places come in lines of one length. What has taps is added up once for each of them, a row
as often as the tap sees its place. Each program adds up one split of the rows, of some channels. Tables are described
in :mod:`gradweave.optim.kernels.sums_tables`.
"""

import triton
import triton.language as tl

from gradweave.optim.kernels.launch_triton import columns_of
from gradweave.optim.kernels.sums_tables import PartProgramRow, PartRow, ProgramRow, TensorRow

TENSOR = columns_of(TensorRow)
PROGRAM = columns_of(ProgramRow)
PART = columns_of(PartRow)
PART_PROGRAM = columns_of(PartProgramRow)


@triton.jit
def _sum_rows(
    x, first, end, places, line_length, sample_stride, line_stride, place_stride, channel_stride, channel, present,
    even: tl.constexpr, num_stages: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Return the sum of some rows, each of which counts once.

    The loop adds to one block of sums, whose rows are added up after it: nothing crosses threads in the loop, and
    several reads are under way at once.
    """
    lane = tl.arange(0, block_rows)
    total = tl.zeros([block_rows, block_channels], tl.float32)
    for start in tl.range(first, end, block_rows, num_stages=num_stages):
        row = start + lane
        if even:  # of a dense tensor, say: without three integer divisions for each row
            at = row.to(tl.int64) * place_stride
        else:
            place = row % places
            at = (row // places).to(tl.int64) * sample_stride + (place // line_length).to(tl.int64) * line_stride
            at += (place % line_length).to(tl.int64) * place_stride
        mask = (row < end)[:, None] & present[None, :]
        total += tl.load(x + at[:, None] + (channel * channel_stride)[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _sum_patches(
    x, counts, taps, first, end, places, line_length, sample_stride, line_stride, place_stride, channel_stride, channel,
    present, padded_taps: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Return the sums of some rows for each tap: a matrix product of counts, taps by rows, with rows by channels.

    Counts are whole numbers that are exact in the precision of the rows, as the host has checked.
    """
    lane = tl.arange(0, block_rows)
    tap = tl.arange(0, padded_taps)
    total = tl.zeros([padded_taps, block_channels], tl.float32)
    for start in range(first, end, block_rows):
        row = start + lane
        place = row % places
        at = (row // places).to(tl.int64) * sample_stride + (place // line_length).to(tl.int64) * line_stride
        at += (place % line_length).to(tl.int64) * place_stride
        mask = (row < end)[:, None] & present[None, :]
        part = tl.load(x + at[:, None] + (channel * channel_stride)[None, :], mask=mask, other=0.0)
        known = (tap < taps)[:, None] & (row < end)[None, :]
        seen = tl.load(counts + tap[:, None] * places + place[None, :], mask=known, other=0.0)
        total = tl.dot(seen, part, total, input_precision="ieee")  # not TF32, which rounds rows
    return total


@triton.jit(do_not_specialize=["rows", "rows_per_split", "places", "line_length"])
def sum_one(
    x, counts, out, rows, rows_per_split, places, line_length, sample_stride, line_stride, place_stride, channel_stride,
    channels, taps, factor, counted: tl.constexpr, even: tl.constexpr, num_stages: tl.constexpr,
    padded_taps: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write the sums of one tensor: split after split, of channels, and of taps of each channel.

    Strides and channels are specialized on: Triton then knows by itself which accesses may be wide. Numbers of rows are
    not, since they differ with each size of a batch.
    """
    split = tl.program_id(1)
    first = split * rows_per_split
    end = tl.minimum(first + rows_per_split, rows)
    channel = (tl.program_id(0) * block_channels + tl.arange(0, block_channels)).to(tl.int64)
    present = channel < channels
    if counted:
        tap = tl.arange(0, padded_taps)
        found = _sum_patches(
            x, counts, taps, first, end, places, line_length, sample_stride, line_stride, place_stride, channel_stride,
            channel, present, padded_taps, block_rows, block_channels,
        )  # fmt: skip
        at = (split * channels + channel)[None, :] * taps + tap[:, None]
        tl.store(out + at, found * factor, mask=present[None, :] & (tap < taps)[:, None])
    else:
        found = _sum_rows(
            x, first, end, places, line_length, sample_stride, line_stride, place_stride, channel_stride, channel,
            present, even, num_stages, block_rows, block_channels,
        )  # fmt: skip
        tl.store(out + split * channels + channel, found * factor, mask=present)


@triton.jit
def sum_many(
    programs, tensors, addresses, images, out, dtype: tl.constexpr, of_images: tl.constexpr, counted: tl.constexpr,
    channels_are_dense: tl.constexpr, aligned: tl.constexpr, even: tl.constexpr, num_stages: tl.constexpr,
    padded_taps: tl.constexpr, block_rows: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Write the sums of many tensors, in the order of :func:`sum_one`."""
    program = programs + tl.program_id(0) * PROGRAM.width
    tensor = tl.load(program + PROGRAM.tensor)
    first_channel = tl.load(program + PROGRAM.start).to(tl.int32)
    split = tl.load(program + PROGRAM.split).to(tl.int32)
    entry = tensors + tensor * TENSOR.width
    rows = tl.load(entry + TENSOR.rows).to(tl.int32)
    rows_per_split = tl.load(entry + TENSOR.rows_per_split).to(tl.int32)
    places = tl.load(entry + TENSOR.places).to(tl.int32)
    line_length = tl.load(entry + TENSOR.line_length).to(tl.int32)
    sample_stride = tl.load(entry + TENSOR.sample_stride)
    line_stride = tl.load(entry + TENSOR.line_stride)
    place_stride = tl.load(entry + TENSOR.place_stride)
    channel_stride = 1
    if not channels_are_dense:
        channel_stride = tl.load(entry + TENSOR.channel_stride)
    channels = tl.load(entry + TENSOR.channels).to(tl.int32)
    taps = tl.load(entry + TENSOR.taps).to(tl.int32)
    out += tl.load(entry + TENSOR.out_at)
    x = (
        images + tl.load(entry + TENSOR.image_at)
        if of_images
        else tl.load(addresses + tensor).to(tl.pointer_type(dtype))
    )
    # Numbers from a table have no known divisibility: without these hints no access would be wide. The host has checked
    # that they hold.
    first_channel = tl.multiple_of(first_channel, 16)
    if aligned:
        x = tl.multiple_of(x, 16)
        sample_stride = tl.multiple_of(sample_stride, 8)
        line_stride = tl.multiple_of(line_stride, 8)
        place_stride = tl.multiple_of(place_stride, 8)
        channels = tl.multiple_of(channels, 8)
    first = split * rows_per_split
    end = tl.minimum(first + rows_per_split, rows)
    channel = first_channel + tl.arange(0, block_channels)
    present = channel < channels
    if counted:
        tap = tl.arange(0, padded_taps)
        counts = tl.load(entry + TENSOR.tap_counts).to(tl.pointer_type(dtype))
        found = _sum_patches(
            x, counts, taps, first, end, places, line_length, sample_stride, line_stride, place_stride, channel_stride,
            channel, present, padded_taps, block_rows, block_channels,
        )  # fmt: skip
        at = (split * channels + channel)[None, :] * taps + tap[:, None]
        tl.store(out + at, found, mask=present[None, :] & (tap < taps)[:, None])
    else:
        found = _sum_rows(
            x, first, end, places, line_length, sample_stride, line_stride, place_stride, channel_stride, channel,
            present, even, num_stages, block_rows, block_channels,
        )  # fmt: skip
        tl.store(out + split * channels + channel, found, mask=present)


@triton.jit
def add_samples(
    programs, tensors, addresses, images, dtype: tl.constexpr, aligned: tl.constexpr, num_stages: tl.constexpr,
    samples_at_once: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Add up samples to few images, each sample as it lies in memory: whatever its order, reads are in a row."""
    program = programs + tl.program_id(0) * PROGRAM.width
    tensor = tl.load(program + PROGRAM.tensor)
    start = tl.load(program + PROGRAM.start).to(tl.int32)
    image = tl.load(program + PROGRAM.split)
    entry = tensors + tensor * TENSOR.width
    stride = tl.load(entry + TENSOR.sample_stride)
    out = images + tl.load(entry + TENSOR.image_at)
    samples = tl.load(entry + TENSOR.samples)
    samples_per_image = tl.load(entry + TENSOR.samples_per_image)
    size = tl.load(entry + TENSOR.image_size)
    x = tl.load(addresses + tensor).to(tl.pointer_type(dtype))
    first = image * samples_per_image
    count = tl.minimum(samples_per_image, samples - first).to(tl.int32)
    x += first * stride
    if aligned:  # hints, as above
        start = tl.multiple_of(start, 16)
        stride = tl.multiple_of(stride, 8)
        x = tl.multiple_of(x, 16)
        size = tl.multiple_of(size, 8)
    at = start + tl.arange(0, block)
    inside = at < size
    lane = tl.arange(0, samples_at_once)
    total = tl.zeros([samples_at_once, block], tl.float32)
    for sample in tl.range(0, count, samples_at_once, num_stages=num_stages):
        mask = (sample + lane < count)[:, None] & inside[None, :]
        offset = (sample + lane).to(tl.int64)[:, None] * stride + at[None, :]
        total += tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + image * size + at, tl.sum(total, 0), mask=inside)


@triton.jit
def add_to_records(programs, parts, sums_at, splits_at_once: tl.constexpr, block: tl.constexpr):
    """Add up splits, and add the result to the records of their layers: each program some columns of one sum.

    A launch has each layer once, so that each element of a record belongs to one program: atomics are not needed.
    """
    program = programs + tl.program_id(0) * PART_PROGRAM.width
    part = parts + tl.load(program + PART_PROGRAM.part) * PART.width
    first = tl.load(program + PART_PROGRAM.first_column).to(tl.int32)
    sums = tl.load(sums_at + tl.load(part + PART.sums)).to(tl.pointer_type(tl.float32))
    record = tl.load(part + PART.record).to(tl.pointer_type(tl.float32))
    splits = tl.load(part + PART.splits).to(tl.int32)
    columns = tl.load(part + PART.columns).to(tl.int32)
    start = tl.load(part + PART.start)
    places = tl.load(part + PART.places)
    places_at = tl.load(part + PART.places_at)
    column = first + tl.arange(0, block)
    present = column < columns
    lane = tl.arange(0, splits_at_once)
    total = tl.zeros([splits_at_once, block], tl.float32)
    for split in range(0, splits, splits_at_once):
        mask = (split + lane < splits)[:, None] & present[None, :]
        total += tl.load(sums + (split + lane)[:, None] * columns + column[None, :], mask=mask, other=0.0)
    target = record + start + column
    tl.store(target, tl.load(target, mask=present, other=0.0) + tl.sum(total, 0), mask=present)
    # The first program of the inputs' part counts places, for the whole layer.
    counts = (first == 0) & (places > 0)
    before = tl.load(record + places_at, mask=counts, other=0.0)
    tl.store(record + places_at, before + places.to(tl.float32), mask=counts)
