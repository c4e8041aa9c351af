"""The sums of many tensors in few launches: tables of what is added up, made once for a set of shapes.

Rows of the tables, all of int64:

- tensor (12): rows, rows of a stretch, places, places of a line, strides of samples, lines, places and channels,
  channels, taps, where the counts of taps are, and where its sums begin in the memory that they are written to.
- program (3): tensor, first channel, stretch.

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
from typing import Any

import torch

from gradweave.optim import fused
from gradweave.optim.addresses import Addresses
from gradweave.optim.sums import Rows

AT_ONCE, COLUMNS = 16, 128
"""Stretches and columns that a program adds to a record at once."""


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


class Together:
    """Adds up tensors of some shapes.

    Args:
        members: The rows of each, its element type, how many stretches, and whether its memory permits wide reads.
        device: Where they are.

    Attributes:
        starts: Where the sums of each begin.
        size: Of the memory that they are written to.
    """

    def __init__(self, members: Sequence[tuple[Rows, torch.dtype, int, bool]], device: torch.device) -> None:
        self.starts: list[int] = []
        self.size = 0
        tensors: list[list[int]] = []
        alike: dict[Any, list[list[int]]] = {}
        for number, (rows, dtype, stretches, aligned) in enumerate(members):
            self.starts.append(self.size)
            counts = 0 if rows.counts is None else rows.counts.data_ptr()
            tensors.append([rows.count, -(-rows.count // stretches), rows.places, rows.width, *rows.strides,
                            rows.channels, rows.taps, counts, self.size])  # fmt: skip
            self.size += -(-stretches * rows.columns // 4) * 4
            dense = rows.strides[3] == 1
            key = (dtype, rows.counts is not None, dense, aligned and dense, rows.padded_taps, *rows.block, rows.warps)
            alike.setdefault(key, []).extend(
                [number, channel, stretch]
                for stretch in range(stretches)
                for channel in range(0, rows.channels, rows.block[1])
            )
        self._counts = [rows.counts for rows, *_ in members]
        self._tensors = torch.tensor(tensors, dtype=torch.int64).to(device)
        self._launches = [(key, torch.tensor(rows, dtype=torch.int64).to(device)) for key, rows in alike.items()]
        self._addresses = Addresses(len(members), device)

    def add_up(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Writes their sums."""
        kernels, flat = (import_module(f"gradweave.optim.{name}") for name in ("sum_kernels", "flat_kernels"))
        capturing = fused.is_capturing(out.device)
        at = self._addresses.holding([x.data_ptr() for x in tensors], flat, capturing=capturing, moves=True)
        for (dtype, counted, dense, aligned, taps, rows, channels, warps), programs in self._launches:
            kernels.sum_many[len(programs),](
                programs, self._tensors, at, out, _element(dtype), counted, dense, aligned, taps, rows, channels,
                num_warps=warps,
            )  # fmt: skip


def is_aligned(rows: Rows, x: torch.Tensor) -> bool:
    """Whether several channels can be read at once."""
    return x.data_ptr() % 16 == 0 and rows.channels % 8 == 0 and all(stride % 8 == 0 for stride in rows.strides[:3])


def _element(dtype: torch.dtype) -> Any:
    language = import_module("triton.language")
    return {torch.float32: language.float32, torch.bfloat16: language.bfloat16, torch.float16: language.float16}[dtype]
