"""What vectors are made of, added up on a GPU: one launch per layer in forward, one for all layers in a step.

A kernel adds up stretches of rows, which stay as they are until the step, where one launch adds the stretches of all
layers to their records; so nothing is added in an order that could change. Outputs' gradients take one more launch per
layer, in backward. The graph of a model is left alone: what is behind a layer's output is a tensor's hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from operator import mul
from typing import TYPE_CHECKING, Any

import torch

from gradweave.compat.eager import is_watched
from gradweave.optim import fused
from gradweave.optim.addresses import Addresses
from gradweave.optim.layouts import CONVOLUTION, LINEAR, TRANSPOSED, Layout
from gradweave.optim.patches import Window

if TYPE_CHECKING:
    from gradweave.optim.capture import Tap

Launcher = Callable[[torch.Tensor, torch.Tensor], Any]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROGRAMS = 256
_FEWEST_ROWS = 64
_MOST_TAPS = 64
_MOST_COUNTS = 1 << 23
_TILE = 8192
_COLUMNS, _AT_ONCE = 128, 16
_MOST_SHAPES = 64
"""How many shapes a layer remembers."""


@dataclass(frozen=True)
class RowSums:
    """How the rows of one tensor are added up.

    Attributes:
        rows: How many.
        places: Of a sample.
        strides: Of samples, places and channels.
        channels: Of a row.
        taps: That see each place, as often as ``counts`` says; 1 where every place counts once.
        counts: Taps by places.
        stretches: How many sums there are.
    """

    rows: int
    places: int
    strides: tuple[int, int, int]
    channels: int
    taps: int
    counts: torch.Tensor | None
    stretches: int

    @property
    def columns(self) -> int:
        """How long a sum is."""
        return self.channels * self.taps

    def launcher(self, dtype: torch.dtype, factor: float = 1.0) -> Launcher:
        """What adds up a tensor of such rows: memory gets one sum behind the other."""
        kernels = import_module("gradweave.optim.sum_kernels")
        rows_each = -(-self.rows // self.stretches)
        width = min(max(_power_of_two(self.channels), 16), 128)
        common = (self.rows, rows_each, self.places, *self.strides, self.channels, factor)
        counts = self.counts
        if counts is None:
            width = width if self.strides[2] == 1 else 16
            rest = (*common, _TILE // width, width)
            sum_rows = kernels.sum_rows[-(-self.channels // width), self.stretches]
            return lambda x, out: sum_rows(x, out, *rest, num_warps=8)
        width = min(width, 64)
        height = 64 if dtype is torch.float32 else 128
        others = (*common, self.taps, max(_power_of_two(self.taps), 16), height, width)
        sum_patches = kernels.sum_patches[-(-self.channels // width), self.stretches]
        return lambda x, out: sum_patches(x, counts, out, *others, num_warps=4)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def row_sums(x: torch.Tensor, layout: Layout, samples: int | None, windows: tuple[Window, ...]) -> RowSums | None:
    """How to add up a layer's input or its output's gradient; None if its memory is in no order that kernels know.

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
    count = sizes[0] if samples is None else min(samples, sizes[0])
    places = reduce(mul, sizes[1:], 1)
    place_stride = _common_stride(sizes[1:], strides[1:])
    rows = count * places
    if place_stride is None or rows == 0 or rows >= 1 << 31:
        return None
    taps, counts = 1, None
    if not all(window.is_plain() for window in windows):
        taps = reduce(mul, (window.kernel for window in windows), 1)
        if taps > _MOST_TAPS or taps * places > _MOST_COUNTS or fused.is_capturing(x.device):
            return None
        counts = _counts(windows, sizes[1:], x)
    blocks = -(-channels // (128 if counts is None else 64))
    stretches = min(max(_PROGRAMS // blocks, 1), -(-rows // _FEWEST_ROWS))
    stretches = -(-rows // -(-rows // stretches))
    return RowSums(rows, places, (strides[0], place_stride, channel_stride), channels, taps, counts, stretches)


def _common_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """From place to place, if several dimensions can be walked as one."""
    stride, step = 0, None
    for size, own in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if step is None:
            stride = own
        elif own != step:
            return None
        step = own * size
    return stride


def _counts(windows: tuple[Window, ...], sizes: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """How often each tap sees each place: taps by places."""
    whole = torch.ones(1, 1, device=x.device)
    for window, size in zip(windows, sizes, strict=True):
        whole = torch.kron(whole, window.counts(size, window.places(size), whole))
    return whole.to(x.dtype).contiguous()


@dataclass(frozen=True)
class Form:
    """Where sums are in what a layer has caught: stretches and columns of inputs and of outputs, and its places."""

    stretches: int
    columns: int
    output_stretches: int
    output_columns: int
    count: int

    @property
    def output_start(self) -> int:
        """First element of the outputs' sums, where their reads can be of several at once."""
        return -(-self.stretches * self.columns // 4) * 4

    @property
    def size(self) -> int:
        """Of everything."""
        return self.output_start + self.output_stretches * self.output_columns


class Plan:
    """What is done with calls of a layer whose inputs and outputs are of one form.

    Attributes:
        form: Where sums are.
        device: Of the layer.
        add_inputs: Adds up an input.
    """

    def __init__(self, tap: Tap, form: Form, device: torch.device, add_inputs: Launcher, share: float) -> None:
        self.form, self.device, self.add_inputs = form, device, add_inputs
        self._share, self._layout = share, tap.layout
        self._add_outputs: dict[Any, Launcher] = {}

    def add_outputs(self, gradient: torch.Tensor, samples: int | None, out: torch.Tensor) -> None:
        """Adds up the gradient of an output."""
        key = (gradient.stride(), gradient.dtype)
        add = self._add_outputs.get(key)
        if add is None:
            sums = row_sums(gradient, self._layout, samples, ())
            if sums is None:
                self.add_outputs(gradient.contiguous(), samples, out)
                return
            add = self._add_outputs[key] = sums.launcher(gradient.dtype, self._share)
        with fused.on_device(self.device):
            add(gradient, out)


class Caught:
    """The sums of one call of a layer; as the hook of its output, it counts when backward comes by."""

    __slots__ = ("is_counted", "memory", "plan", "tap")

    def __init__(self, tap: Tap, memory: torch.Tensor, plan: Plan) -> None:
        self.tap, self.memory, self.plan = tap, memory, plan
        self.is_counted = False

    def __call__(self, gradient: torch.Tensor) -> None:
        """In backward: adds up outputs, if these are wanted; the step does the rest."""
        one, tap, form = self, self.tap, self.plan.form
        if form.output_columns:
            if self.is_counted:
                one = Caught(tap, self.memory.clone(), self.plan)
            self.plan.add_outputs(gradient, tap.output_count(gradient), one.memory[form.output_start :])
        self.is_counted = True
        tap.caught.append(one)


def catch(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Adds up a layer's input, and hooks its output; False where kernels do not apply."""
    if type(x) not in _PLAIN or type(y) is not torch.Tensor or tap.masking.mask is not None or is_watched():
        return False
    key = (x.shape, x.stride(), x.dtype, x.device, y.shape, y.dtype)
    plan = tap.plans.get(key)
    if plan is None:
        plan = _new_plan(tap, x, y)
        if plan is None:
            return False
        if len(tap.plans) >= _MOST_SHAPES:
            tap.plans.clear()
        tap.plans[key] = plan
    memory = torch.empty(plan.form.size, device=plan.device)
    with fused.on_device(plan.device):
        plan.add_inputs(x, memory)
    y.register_hook(Caught(tap, memory, plan))
    return True


def _new_plan(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> Plan | None:
    layout = tap.layout
    if x.dtype not in _DTYPES or y.dtype not in _DTYPES or not fused.has_kernels(x.device):
        return None
    if layout.kind == TRANSPOSED and tap.with_outputs:
        return None
    windows = layout.windows if layout.kind == CONVOLUTION else ()
    sums = row_sums(x, layout, tap.catching.input_samples, windows)
    if sums is None:
        return None
    stretches = columns = 0
    if tap.with_outputs:
        like = row_sums(torch.empty(y.shape, device="meta"), layout, tap.output_count(y), ())
        if like is None:
            return None
        stretches, columns = like.stretches, like.columns
    count = sums.rows
    if windows:
        seen = (window.places(size) for window, size in zip(windows, x.shape[-len(windows) :], strict=True))
        count = reduce(mul, seen, sums.rows // sums.places)
    form = Form(sums.stretches, sums.columns, stretches, columns, count)
    return Plan(tap, form, x.device, sums.launcher(x.dtype), tap.share_of(y))


@dataclass
class _Table:
    """Programs of one launch, by what layers have caught."""

    programs: torch.Tensor
    parts: torch.Tensor
    count: int
    memories: Addresses
    records: Addresses


class Settling:
    """Adds what layers have caught to their records."""

    def __init__(self) -> None:
        self._tables: dict[Any, _Table] = {}

    def settle(self, taps: Sequence[Tap]) -> None:
        """Once for each call of a layer; mostly that is one launch."""
        if torch.compiler.is_compiling():
            return
        while ready := [tap for tap in taps if tap.caught and tap.record is not None]:
            by_device: dict[torch.device, list[tuple[Tap, Caught]]] = {}
            for tap in ready:
                one = tap.caught.pop(0)
                by_device.setdefault(one.memory.device, []).append((tap, one))
            for device, members in by_device.items():
                with fused.on_device(device):
                    self._add(members, device)

    def _add(self, members: Sequence[tuple[Tap, Caught]], device: torch.device) -> None:
        capturing = fused.is_capturing(device)
        key = (device, tuple(one.plan.form for _, one in members))
        table = self._tables.get(key)
        if table is None:
            if capturing:
                for tap, one in members:
                    _add_without_kernel(tap, one)
                return
            if len(self._tables) >= _MOST_SHAPES:
                self._tables.clear()
            table = self._tables[key] = _new_table([one.plan.form for _, one in members], device)
        kernels, flat = (import_module(f"gradweave.optim.{name}") for name in ("sum_kernels", "flat_kernels"))
        memories = [one.memory.data_ptr() for _, one in members]
        records = [tap.record.data_ptr() for tap, _ in members]  # type: ignore[union-attr]
        kernels.add_to_records[(table.count,)](
            table.programs, table.parts, table.memories.holding(memories, flat, capturing=capturing, moves=True),
            table.records.holding(records, flat, capturing=capturing, moves=False), _AT_ONCE, _COLUMNS,
        )  # fmt: skip


def _new_table(forms: Sequence[Form], device: torch.device) -> _Table:
    parts: list[list[int]] = []
    programs: list[list[int]] = []
    for layer, form in enumerate(forms):
        inputs = [layer, 0, form.stretches, form.columns, 0, form.count, form.columns, 0]
        outputs = [layer, form.output_start, form.output_stretches, form.output_columns, form.columns + 1, 0, 0, 0]
        for part in (inputs, outputs):
            programs += [[len(parts), first] for first in range(0, part[3], _COLUMNS)]
            parts.append(part)
    programs_there, parts_there = (torch.tensor(rows, dtype=torch.int64).to(device) for rows in (programs, parts))
    memories, records = Addresses(len(forms), device), Addresses(len(forms), device)
    return _Table(programs_there, parts_there, len(programs), memories, records)


def _add_without_kernel(tap: Tap, one: Caught) -> None:
    """The same by torch's operations, for a graph that is captured before a step like it has run."""
    form, memory, record = one.plan.form, one.memory, tap.record
    inputs = memory[: form.stretches * form.columns].view(form.stretches, form.columns)
    record[: form.columns].add_(inputs.sum(0))  # type: ignore[index]
    record[form.columns].add_(form.count)  # type: ignore[index]
    if form.output_columns:
        outputs = memory[form.output_start :].view(form.output_stretches, form.output_columns)
        record[form.columns + 1 :].add_(outputs.sum(0))  # type: ignore[index]
