"""The sums of many tensors in few launches: tables of what is added up, made once for a set of shapes.

Rows of the tables, all of int64:

- tensor (16): rows, rows of a stretch, places, places of a line, strides of samples, lines, places and channels,
  channels, taps, where the counts of taps are, where its sums begin in the memory that they are written to; and of
  patches whose samples are added up first, where their images begin, samples, samples of an image, and its size. A
  tensor of images has an entry of its own.
- program (3): tensor, first channel (of an image, first element), stretch.

What is added to records has tables of its own:

- part (8): which of the sums; the record; stretches, columns; where in the record; places, to be
  added where, if this is the part that counts them.
- program (2): part, first column.

Tensors are where a table of addresses says, since they move from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

from gradweave.optim.kernels import step as fused
from gradweave.optim.kernels.addresses import Addresses
from gradweave.optim.kernels.sums import AHEAD, Rows, images_of

AT_ONCE, COLUMNS = 16, 128
"""Stretches and columns that a program adds to a record at once."""
WIDE = 16
"""Bytes of a wide read: memory that begins at a multiple of them is aligned."""
IMAGE_SAMPLES = 64
"""That are added up to one image."""
FEWEST_SAMPLES = 32
"""That are worth an image: it is in float32, and there when memory is scarcest."""
FOLDED, FOLDED_AT_ONCE = 1024, 8
"""Elements and samples that a program adds to an image at once."""


@dataclass(frozen=True)
class Form:
    """What the sums of a layer are: stretches and columns of inputs and of outputs, and how many places they are of."""

    stretches: int
    columns: int
    output_stretches: int
    output_columns: int
    count: int


def record_tables(
    forms: Sequence[Form], records: Sequence[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Programs and parts of one launch that adds sums to records.

    Args:
        forms: Of the layers' sums.
        records: The layers'; the sums of each one's inputs are followed by those of its outputs.
        device: Where they are.
    """
    parts: list[list[int]] = []
    programs: list[list[int]] = []
    for layer, (form, record) in enumerate(zip(forms, records, strict=True)):
        at = record.data_ptr()
        inputs = [2 * layer, at, form.stretches, form.columns, 0, form.count, form.columns, 0]
        outputs = [2 * layer + 1, at, form.output_stretches, form.output_columns, form.columns + 1, 0, 0, 0]
        for part in (inputs, outputs):
            programs += [[len(parts), first] for first in range(0, part[3], COLUMNS)]
            parts.append(part)
    there = [torch.tensor(rows, dtype=torch.int64).to(device) for rows in (programs, parts)]
    return there[0], there[1]


class Member(NamedTuple):
    """A tensor that is added up with others: rows, element type, stretches, and whether its beginning is aligned."""

    rows: Rows
    dtype: torch.dtype
    stretches: int
    aligned: bool


class Together:
    """Adds up tensors of some shapes.

    Patches of samples that are in one piece are added up in two stages: samples as they lie in memory, which is as fast
    as memory is, and then the patches of the few images that are left.

    Args:
        members: What is added up.
        device: Where they are.

    Attributes:
        starts: Where the sums of each begin.
        size: Of the memory that they are written to.
    """

    def __init__(self, members: Sequence[Member], device: torch.device) -> None:
        self.starts: list[int] = []
        self.size = 0
        self._images = 0
        self._counts: list[torch.Tensor | None] = []
        self._table: list[list[int]] = []
        programs: dict[Any, list[list[int]]] = {}
        folded: dict[Any, list[list[int]]] = {}
        for member in members:
            self.starts.append(self.size)
            self._enter(member)
            self.size += -(-member.stretches * member.rows.columns // 4) * 4
        for number, (start, member) in enumerate(zip(self.starts, members, strict=True)):
            images = parts_of(member.rows)
            if not images:
                programs.setdefault(_key(member, of_images=False), []).extend(_programs(number, member))
                continue
            size = member.rows.places * member.rows.channels
            wide = member.aligned and size % 8 == 0 and member.rows.strides[0] % 8 == 0
            starts = range(0, size, FOLDED)
            folded.setdefault((member.dtype, wide), []).extend(
                [number, first, part] for part in range(images) for first in starts
            )
            whole = Member(images_of(member.rows, images), torch.float32, member.stretches, aligned=True)
            programs.setdefault(_key(whole, of_images=True), []).extend(_programs(len(self._table), whole))
            self._table[number][12:16] = self._images, member.rows.samples, IMAGE_SAMPLES, size
            self._enter(whole, start, self._images)
            self._images += -(-images * size // 8) * 8
        self._tensors = torch.tensor(self._table, dtype=torch.int64).to(device)
        self._folded = [(key, torch.tensor(rows, dtype=torch.int64).to(device)) for key, rows in folded.items()]
        self._launches = [(key, torch.tensor(rows, dtype=torch.int64).to(device)) for key, rows in programs.items()]
        self._addresses = Addresses(len(members), device)

    def _enter(self, member: Member, start: int | None = None, image: int = 0) -> None:
        """Writes a tensor down."""
        rows = member.rows
        counts = 0 if rows.counts is None else rows.counts.data_ptr()
        self._table.append([rows.count, rows.each(member.stretches), rows.places, rows.width, *rows.strides,
                            rows.channels, rows.taps, counts, self.size if start is None else start,
                            image, 0, 0, 0])  # fmt: skip
        self._counts.append(rows.counts)

    def add_up(self, places: list[int], out: torch.Tensor) -> None:
        """Writes the sums of tensors that are at some places in memory."""
        kernels, flat = (
            import_module(f"gradweave.optim.kernels.{name}") for name in ("sums_triton", "first_order_triton")
        )
        capturing = fused.is_capturing(out.device)
        at = self._addresses.holding(places, flat, capturing=capturing, moves=True)
        images = torch.empty(self._images, dtype=torch.float32, device=out.device) if self._images else out
        for (dtype, aligned), programs in self._folded:
            kernels.fold[len(programs),](
                programs,
                self._tensors,
                at,
                images,
                _element(dtype),
                aligned,
                AHEAD,
                FOLDED_AT_ONCE,
                FOLDED,
                num_warps=8,
            )
        for (dtype, *shape, warps), programs in self._launches:
            kernels.sum_many[len(programs),](
                programs, self._tensors, at, images, out, _element(dtype), *shape, num_warps=warps
            )


def parts_of(rows: Rows) -> int:
    """How many images the samples of patches are added up to; 0 if they are not."""
    are_many = rows.samples >= FEWEST_SAMPLES
    return -(-rows.samples // IMAGE_SAMPLES) if rows.counts is not None and rows.whole and are_many else 0


def _key(member: Member, *, of_images: bool) -> Any:
    """What tensors of one launch have in common."""
    rows, dense = member.rows, member.rows.strides[3] == 1
    counted = rows.counts is not None
    wide = member.aligned and dense and rows.channels % 8 == 0 and all(stride % 8 == 0 for stride in rows.strides[:3])
    even = rows.are_even and not counted
    return member.dtype, of_images, counted, dense, wide, even, AHEAD, rows.padded_taps, *rows.block, rows.warps


def _programs(number: int, member: Member) -> list[list[int]]:
    rows = member.rows
    channels = range(0, rows.channels, rows.block[1])
    return [[number, channel, stretch] for stretch in range(member.stretches) for channel in channels]


def _element(dtype: torch.dtype) -> Any:
    language = import_module("triton.language")
    return {torch.float32: language.float32, torch.bfloat16: language.bfloat16, torch.float16: language.float16}[dtype]
