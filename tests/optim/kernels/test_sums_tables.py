"""Tables of sums of many tensors: programs write every sum once, and add it to the right record."""

import torch
from torch import nn

from gradweave.optim.kernels.sums import row_layout
from gradweave.optim.kernels.sums_tables import (
    RECORD_COLUMNS,
    SAMPLES_PER_IMAGE,
    BatchedSum,
    Operand,
    PartProgramRow,
    PartRow,
    ProgramRow,
    SumShape,
    TensorRow,
    image_count,
    make_record_tables,
)
from gradweave.optim.statistics.geometry import layout_of

CPU = torch.device("cpu")


def rows_of(table, row):
    return [row(*numbers) for numbers in table.tolist()]


def operand(layer, x, splits):
    layout = layout_of(layer)
    return Operand(row_layout(x, layout, None, layout.windows), x.dtype, splits, is_aligned=True)


def make_batch():
    operands = [
        operand(nn.Linear(200, 1), torch.randn(300, 200), splits=3),
        operand(nn.Conv2d(3, 4, 3), torch.randn(130, 3, 6, 5), splits=2),
        operand(nn.Conv2d(3, 4, 3), torch.randn(5, 3, 6, 5), splits=1),
    ]
    return operands, BatchedSum(operands, CPU)


def test_programs_write_every_sum_once():
    operands, batch = make_batch()
    tensors = rows_of(batch._tensors, TensorRow)
    written = torch.zeros(batch.size)
    for variant, table in batch._sum_launches:
        for program in rows_of(table, ProgramRow):
            row = tensors[program.tensor]
            end = min(program.start + variant.block_channels, row.channels)
            start = row.out_at + program.split * row.channels * row.taps
            written[start + program.start * row.taps : start + end * row.taps] += 1
    for offset, one in zip(batch.offsets, operands, strict=True):
        size = one.splits * one.rows.columns
        assert (written[offset : offset + size] == 1).all()
        written[offset : offset + size] = 0
    assert not written.any()


def test_samples_of_patches_are_added_up_to_images_if_there_are_many():
    operands, batch = make_batch()
    assert [image_count(one.rows) for one in operands] == [0, 3, 0]
    tensors = rows_of(batch._tensors, TensorRow)
    assert len(tensors) == 4
    given, images = tensors[1], tensors[3]
    assert (given.samples, given.samples_per_image, given.image_size) == (130, SAMPLES_PER_IMAGE, 3 * 6 * 5)
    assert (images.rows, images.sample_stride, images.out_at) == (3 * 6 * 5, 3 * 6 * 5, given.out_at)
    ((_, table),) = batch._image_launches
    assert {program.split for program in rows_of(table, ProgramRow)} == {0, 1, 2}


def test_records_get_each_column_once_and_places_once():
    shapes = [SumShape(2, 300, 3, 40, places=7), SumShape(1, 5, 0, 0, places=9)]
    records = [torch.zeros(341), torch.zeros(6)]
    programs, parts = make_record_tables(shapes, records, CPU)
    programs, parts = rows_of(programs, PartProgramRow), rows_of(parts, PartRow)
    for program in programs:
        part = parts[program.part]
        record = next(one for one in records if one.data_ptr() == part.record)
        end = min(program.first_column + RECORD_COLUMNS, part.columns)
        record[part.start + program.first_column : part.start + end] += 1
        if program.first_column == 0:
            record[part.places_at] += part.places
    assert (records[0][:300] == 1).all()
    assert (records[0][301:] == 1).all()
    assert records[0][300] == 7
    assert records[1].tolist() == [1, 1, 1, 1, 1, 9]
    assert [part.sums for part in parts] == [0, 1, 2, 3]
