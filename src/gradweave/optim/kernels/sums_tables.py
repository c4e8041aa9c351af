"""Sums of many tensors in few launches, by tables that are made once for a set of shapes.

Each ``NamedTuple`` here is the schema of a table, whose rows are its instances, as int64. Kernels take the numbers of
columns from the same classes (see :func:`gradweave.optim.kernels.launch_triton.columns_of`). Tensors are found by a
table of addresses, since they are elsewhere in each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

from gradweave.optim.kernels.launch import AddressTable, is_capturing, triton_module
from gradweave.optim.kernels.sums import NUM_STAGES, RowLayout, image_layout

SPLITS_AT_ONCE, RECORD_COLUMNS = 16, 128
"""Splits and columns that a program adds to a record at once."""
SAMPLES_PER_IMAGE = 64
_MIN_SAMPLES = 32
"""Samples that are worth an image, which takes memory, in float32, when it is scarcest."""
_IMAGE_ELEMENTS, _SAMPLES_AT_ONCE = 1024, 8
"""Elements and samples that a program adds to an image at once."""
_VECTOR = 8
"""Elements of the widest access in half precision; rows whose strides are multiples of it are aligned in any dtype."""


class TensorRow(NamedTuple):
    """Row of the table of tensors: one for each tensor, and another one for its images if it has some."""

    rows: int
    rows_per_split: int
    places: int
    line_length: int
    sample_stride: int
    line_stride: int
    place_stride: int
    channel_stride: int
    channels: int
    taps: int
    tap_counts: int
    """Address of the counts of taps; 0 where every place counts once."""
    out_at: int
    """Offset of its sums in the output."""
    image_at: int = 0
    """Offset of its first image in the memory of images."""
    samples: int = 0
    samples_per_image: int = 0
    image_size: int = 0


class ProgramRow(NamedTuple):
    """Row of the tables of programs."""

    tensor: int
    start: int
    """First channel; of an image, first element."""
    split: int
    """Number of the split, or of the image."""


class PartRow(NamedTuple):
    """Row of the table of what is added to records: the sums of a layer's inputs, or those of its outputs."""

    sums: int
    """Number of the address of the sums."""
    record: int
    """Address of the record."""
    splits: int
    columns: int
    start: int
    """First element in the record."""
    places: int
    """Number of places that is added too; 0 for the part that does not count them."""
    places_at: int
    """Element in the record that counts places."""


class PartProgramRow(NamedTuple):
    """Row of the table of programs that add to records."""

    part: int
    first_column: int


@dataclass(frozen=True)
class SumShape:
    """What the sums of a layer are.

    Attributes:
        splits: Splits of the sums of inputs.
        columns: Length of the sums of inputs.
        output_splits: Splits of the sums of outputs' gradients; 0 without them.
        output_columns: Length of the sums of outputs' gradients; 0 without them.
        places: Number of places that are added up.
    """

    splits: int
    columns: int
    output_splits: int
    output_columns: int
    places: int


def make_record_tables(
    shapes: Sequence[SumShape], records: Sequence[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables of programs and parts of one launch that adds sums to records.

    Addresses of sums are expected in pairs: those of a layer's inputs, and those of its outputs.

    Args:
        shapes: Shapes of layers' sums.
        records: The layers' records: sums of inputs, number of places, sums of outputs.
        device: Where they are.
    """
    parts: list[PartRow] = []
    programs: list[PartProgramRow] = []
    for layer, (shape, record) in enumerate(zip(shapes, records, strict=True)):
        address = record.data_ptr()
        inputs = PartRow(
            sums=2 * layer,
            record=address,
            splits=shape.splits,
            columns=shape.columns,
            start=0,
            places=shape.places,
            places_at=shape.columns,
        )
        outputs = PartRow(
            sums=2 * layer + 1,
            record=address,
            splits=shape.output_splits,
            columns=shape.output_columns,
            start=shape.columns + 1,
            places=0,
            places_at=0,
        )
        for part in (inputs, outputs):
            programs += [PartProgramRow(len(parts), first) for first in range(0, part.columns, RECORD_COLUMNS)]
            parts.append(part)
    return _table(programs, device), _table(parts, device)


def _table(rows: Iterable[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(rows), dtype=torch.int64).to(device)


class Operand(NamedTuple):
    """A tensor that is added up together with others."""

    rows: RowLayout
    dtype: torch.dtype
    splits: int
    is_aligned: bool
    """Whether it begins at a multiple of 16 bytes."""


class _SumVariant(NamedTuple):
    """What tensors of one launch have in common: constants that the kernel is compiled for."""

    dtype: torch.dtype
    is_of_images: bool
    is_counted: bool
    is_channel_dense: bool
    is_aligned: bool
    is_evenly_spaced: bool
    num_stages: int
    padded_taps: int
    block_rows: int
    block_channels: int
    num_warps: int


class BatchedSum:
    """Adds up tensors of some shapes, all of them together.

    Patches are added up in two stages where samples are dense and many: samples as they lie in memory, which is as fast
    as memory is, and then the patches of the few images that are left.

    Args:
        operands: What is added up.
        device: Where they are.

    Attributes:
        offsets: Where the sums of each begin in the output.
        size: Size of the output.
    """

    def __init__(self, operands: Sequence[Operand], device: torch.device) -> None:
        self.offsets: list[int] = []
        self.size = 0
        self._image_elements = 0
        self._kept_counts: list[torch.Tensor | None] = []  # tables hold nothing but their addresses
        tensors: list[TensorRow] = []
        sums: dict[_SumVariant, list[ProgramRow]] = {}
        images: dict[tuple[torch.dtype, bool], list[ProgramRow]] = {}
        for operand in operands:
            self.offsets.append(self.size)
            tensors.append(self._tensor_row(operand, self.size))
            self.size += -(-operand.splits * operand.rows.columns // 4) * 4
        for number, (offset, operand) in enumerate(zip(self.offsets, operands, strict=True)):
            rows = operand.rows
            count = image_count(rows)
            if not count:
                sums.setdefault(_variant(operand, is_of_images=False), []).extend(_programs(number, operand))
                continue
            size = rows.places * rows.channels
            is_aligned = operand.is_aligned and size % _VECTOR == 0 and rows.strides.sample % _VECTOR == 0
            images.setdefault((operand.dtype, is_aligned), []).extend(
                ProgramRow(number, start, image) for image in range(count) for start in range(0, size, _IMAGE_ELEMENTS)
            )
            of_images = Operand(image_layout(rows, count), torch.float32, operand.splits, is_aligned=True)
            sums.setdefault(_variant(of_images, is_of_images=True), []).extend(_programs(len(tensors), of_images))
            tensors[number] = tensors[number]._replace(
                image_at=self._image_elements,
                samples=rows.samples,
                samples_per_image=SAMPLES_PER_IMAGE,
                image_size=size,
            )
            tensors.append(self._tensor_row(of_images, offset)._replace(image_at=self._image_elements))
            self._image_elements += -(-count * size // _VECTOR) * _VECTOR
        self._tensors = _table(tensors, device)
        self._image_launches = [(key, _table(programs, device)) for key, programs in images.items()]
        self._sum_launches = [(variant, _table(programs, device)) for variant, programs in sums.items()]
        self._addresses = AddressTable(len(operands), device)

    def _tensor_row(self, operand: Operand, offset: int) -> TensorRow:
        rows = operand.rows
        self._kept_counts.append(rows.tap_counts)
        return TensorRow(
            rows=rows.count,
            rows_per_split=rows.rows_per_split(operand.splits),
            places=rows.places,
            line_length=rows.line_length,
            sample_stride=rows.strides.sample,
            line_stride=rows.strides.line,
            place_stride=rows.strides.place,
            channel_stride=rows.strides.channel,
            channels=rows.channels,
            taps=rows.taps,
            tap_counts=0 if rows.tap_counts is None else rows.tap_counts.data_ptr(),
            out_at=offset,
        )

    def add_up(self, addresses: Sequence[int], out: torch.Tensor) -> None:
        """Write the sums of tensors at some addresses."""
        kernels = triton_module("sums_triton")
        at = self._addresses.write(addresses, capturing=is_capturing(out.device), changes_each_step=True)
        images = out  # an argument that no kernel reads, if there are none
        if self._image_elements:
            images = torch.empty(self._image_elements, dtype=torch.float32, device=out.device)
        for (dtype, is_aligned), programs in self._image_launches:
            kernels.add_samples[len(programs),](
                programs, self._tensors, at, images, _triton_dtype(dtype), is_aligned, NUM_STAGES, _SAMPLES_AT_ONCE,
                _IMAGE_ELEMENTS, num_warps=8,
            )  # fmt: skip
        for (dtype, *constants, num_warps), programs in self._sum_launches:
            kernels.sum_many[len(programs),](
                programs, self._tensors, at, images, out, _triton_dtype(dtype), *constants, num_warps=num_warps
            )


def image_count(rows: RowLayout) -> int:
    """Return the number of images that a tensor's samples are added up to; 0 if they are not."""
    if rows.tap_counts is None or not rows.has_dense_samples or rows.samples < _MIN_SAMPLES:
        return 0
    return -(-rows.samples // SAMPLES_PER_IMAGE)


def _variant(operand: Operand, *, is_of_images: bool) -> _SumVariant:
    rows, is_channel_dense = operand.rows, operand.rows.strides.channel == 1
    is_counted = rows.tap_counts is not None
    multiples = (rows.channels, *rows.strides[:3])
    return _SumVariant(
        operand.dtype,
        is_of_images,
        is_counted,
        is_channel_dense,
        operand.is_aligned and is_channel_dense and all(number % _VECTOR == 0 for number in multiples),
        rows.is_evenly_spaced and not is_counted,
        NUM_STAGES,
        rows.padded_taps,
        *rows.block_shape,
        rows.num_warps,
    )


def _programs(number: int, operand: Operand) -> list[ProgramRow]:
    channels = range(0, operand.rows.channels, operand.rows.block_shape[1])
    return [ProgramRow(number, channel, split) for split in range(operand.splits) for channel in channels]


def _triton_dtype(dtype: torch.dtype) -> Any:
    language = import_module("triton.language")
    return {torch.float32: language.float32, torch.bfloat16: language.bfloat16, torch.float16: language.float16}[dtype]
