"""What layers give to their vectors on a GPU, outside of compilers: few launches for all of them.

Behind a layer's output is an autograd function that returns it as it is. Until backward comes by, a layer's input
waits, which autograd keeps for the weight's gradient anyway; when backward reaches the first that waits, all of them
are added up together. Inputs that autograd does not keep as they are (another precision than autocast computes in,
patches of a padded copy, activation checkpointing) are added up at once, layer by layer. Outputs' gradients are added
up when they come by. At the end of each backward everything is added to the layers' records, in one more launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib import import_module
from operator import mul
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from gradweave.compat.eager import (
    at_end_of_backward,
    current_backward,
    is_watched,
    raw_stream,
    saved_tensors_are_hooked,
)
from gradweave.optim import fused
from gradweave.optim.addresses import Addresses
from gradweave.optim.forwards import Forwards
from gradweave.optim.layouts import CONVOLUTION, LINEAR, TRANSPOSED
from gradweave.optim.sum_tables import AT_ONCE, COLUMNS, Form, Together, is_aligned, record_tables
from gradweave.optim.sums import Launcher, Rows, is_narrow, launcher, rows_of, samples_first

if TYPE_CHECKING:
    from gradweave.optim.capture import Tap

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BESIDE_OTHERS = 128
"""Programs for one of many tensors that are added up together."""
_MOST_SHAPES = 64
"""How many shapes are remembered."""


class Plan:
    """What is done with calls of a layer whose inputs and outputs are alike.

    Attributes:
        form: Of its sums.
        device: Where it is.
        rows: Of its input.
        dtype: Of its input.
        waits: Whether its input can be added up with others when backward comes by.
        is_narrow: Whether samples are better added up first, in a launch of their own.
    """

    def __init__(self, tap: Tap, x: torch.Tensor, rows: Rows, form: Form, share: float, *, waits: bool) -> None:
        self.form, self.device, self.rows, self.dtype, self.waits = form, x.device, rows, x.dtype, waits
        self.is_narrow = is_narrow(rows, x, len(tap.layout.windows))
        self.add_inputs = (samples_first if self.is_narrow else launcher)(rows, form.stretches)
        self._share, self._layout = share, tap.layout
        self._add_outputs: dict[Any, Launcher] = {}

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """The sums of an input by itself."""
        sums = _memory(self.form.stretches * self.form.columns, self.device)
        with fused.on_device(self.device):
            self.add_inputs(x, sums)
        return sums

    def outputs(self, gradient: torch.Tensor, samples: int | None) -> torch.Tensor:
        """The sums of the gradient of an output."""
        gradient = gradient.resolve_neg()
        key = (gradient.stride(), gradient.dtype)
        add = self._add_outputs.get(key)
        if add is None:
            rows = rows_of(gradient, self._layout, samples)
            if rows is None:
                return self.outputs(gradient.contiguous(), samples)
            add = self._add_outputs[key] = launcher(rows, self.form.output_stretches, self._share)
        sums = _memory(self.form.output_stretches * self.form.output_columns, self.device)
        with fused.on_device(self.device):
            add(gradient, sums)
        return sums


def _memory(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float32, device=device)


@dataclass
class Sums:
    """What one backward through a layer gave."""

    tap: Tap
    plan: Plan
    inputs: torch.Tensor
    start: int
    outputs: torch.Tensor | None
    stream: int


class Waiting:
    """The input of one call of a layer, until backward comes by."""

    __slots__ = ("__weakref__", "found", "plan", "stream", "x")

    def __init__(self, plan: Plan, x: torch.Tensor, stream: int) -> None:
        self.plan, self.stream = plan, stream
        self.x: torch.Tensor | None = x
        self.found: tuple[torch.Tensor, int] | None = None


class _Through(torch.autograd.Function):
    """Lets an output pass, and counts a layer's sums in backward: as often as its weight gets a gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, tap: Tap, plan: Plan, kept: torch.Tensor, waiting: Waiting | None
    ) -> torch.Tensor:
        """Keeps an input, or its sums, as long as autograd keeps what it needs."""
        ctx.save_for_backward(kept)
        ctx.tap, ctx.plan, ctx.waiting = tap, plan, waiting
        return y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Adds up what has waited for this, and outputs if these are wanted."""
        (kept,) = ctx.saved_tensors
        tap, plan, waiting = ctx.tap, ctx.plan, ctx.waiting
        with torch.no_grad():
            inputs, start = kept, 0
            if waiting is not None:
                inputs, start = tap.catcher.sums_of(waiting) or (plan.inputs(kept), 0)
            outputs = None
            if plan.form.output_columns:
                outputs = plan.outputs(gradient.detach(), tap.output_count(gradient))
            tap.catcher.count(Sums(tap, plan, inputs, start, outputs, raw_stream(plan.device)))
        return gradient, None, None, None, None


def catch(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """An output whose backward counts what a layer's vectors are made of; None where kernels do not apply."""
    record = tap.record
    if type(x) not in _PLAIN or type(y) is not torch.Tensor or tap.masking.mask is not None or is_watched():
        return None
    if record is None or record.device != x.device or record.dtype is not torch.float32 or x.is_neg():
        return None
    key = (x.shape, x.stride(), x.dtype, x.device, y.shape, y.dtype)
    plan = tap.plans.get(key)
    if plan is None:
        plan = _new_plan(tap, x, y)
        if plan is None:
            return None
        if len(tap.plans) >= _MOST_SHAPES:
            tap.plans.clear()
        tap.plans[key] = plan
    if fused.is_capturing(plan.device):
        tap.catcher.keep(plan)
    going = tap.catcher.forwards.going
    if going is not None and not saved_tensors_are_hooked():
        going.learns(tap, plan, x, y)
    kept, waiting = x.detach(), None
    if plan.waits and not saved_tensors_are_hooked():
        waiting = Waiting(plan, kept, raw_stream(plan.device))
        tap.catcher.wait(waiting)
    else:
        kept = plan.inputs(kept)
    result: torch.Tensor = _Through.apply(y, tap, plan, kept, waiting)  # type: ignore[no-untyped-call]
    return result


def _new_plan(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> Plan | None:
    layout = tap.layout
    if x.dtype not in _DTYPES or y.dtype not in _DTYPES or not fused.has_kernels(x.device):
        return None
    if layout.kind == TRANSPOSED and tap.with_outputs:
        return None
    windows = layout.windows if layout.kind == CONVOLUTION else ()
    rows = rows_of(x, layout, tap.catching.input_samples, windows)
    if rows is None:
        return None
    output_stretches = output_columns = 0
    if tap.with_outputs:
        outputs = rows_of(torch.empty(y.shape, device="meta"), layout, tap.output_count(y))
        if outputs is None:
            return None
        output_stretches, output_columns = outputs.stretches(), outputs.columns
    count = rows.count
    if windows:
        seen = (window.places(size) for window, size in zip(windows, x.shape[-len(windows) :], strict=True))
        samples = x.shape[0] if x.dim() == len(windows) + 2 else 1
        count = reduce(mul, seen, min(samples, tap.catching.input_samples or samples))
    narrow = is_narrow(rows, x, len(windows))
    waits = _is_kept_by_autograd(tap, x, y) and not narrow
    if waits:
        stretches = rows.stretches(_BESIDE_OTHERS)
    else:
        stretches = (replace(rows, count=rows.places) if narrow else rows).stretches()
    form = Form(stretches, rows.columns, output_stretches, output_columns, count)
    return Plan(tap, x, rows, form, tap.share_of(y), waits=waits)


def _is_kept_by_autograd(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether what the weight's gradient is made of is the input itself, and not a copy of it."""
    if x.dtype != y.dtype:
        return False
    if tap.layout.kind == LINEAR:
        return x.dim() == 2 or (x.dim() > 2 and x.is_contiguous())
    return all(window.mode == "zeros" and window.before == window.after for window in tap.layout.windows)


@dataclass
class _Table:
    """Programs of one launch, by what layers have caught."""

    programs: torch.Tensor
    parts: torch.Tensor
    sums: Addresses
    records: list[torch.Tensor]


class Catcher:
    """What the layers of one optimizer do together."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: list[ref[Waiting]] = []
        self._most = _MOST_SHAPES
        self._counted: list[Sums] = []
        self._ends: set[int] = set()
        self._together: dict[Any, Together] = {}
        self._tables: dict[Any, _Table] = {}
        self._in_graphs: dict[int, Any] = {}
        self.forwards = Forwards(self.keep)

    def keep(self, *used: Any) -> None:
        """Keeps what a CUDA graph that is being captured will read whenever it is replayed."""
        self._in_graphs |= {id(one): one for one in used}

    def wait(self, one: Waiting) -> None:
        """Has an input added up with others, unless its graph is thrown away."""
        with self._lock:
            self._waiting.append(ref(one))
            if len(self._waiting) > self._most:
                self._waiting = [other for other in self._waiting if other() is not None]
                self._most = 2 * len(self._waiting) + _MOST_SHAPES

    def sums_of(self, one: Waiting) -> tuple[torch.Tensor, int] | None:
        """The sums of an input that has waited, with all that wait on its stream; None if they were taken before."""
        if one.x is not None:
            with self._lock:
                alive = [other for reference in self._waiting if (other := reference()) is not None]
                here = (one.plan.device, one.stream)
                members = [other for other in alive if (other.plan.device, other.stream) == here]
                self._waiting = [ref(other) for other in alive if (other.plan.device, other.stream) != here]
            if one in members:
                with fused.on_device(one.plan.device):
                    self._add_up(members, one.plan.device)
            one.x = None
        found, one.found = one.found, None
        return found

    def _add_up(self, members: Sequence[Waiting], device: torch.device) -> None:
        inputs = [one.x for one in members if one.x is not None]
        key = tuple((one.plan, is_aligned(one.plan.rows, x)) for one, x in zip(members, inputs, strict=True))
        together = self._together.get(key)
        capturing = fused.is_capturing(device)
        if together is None and capturing:
            for one, x in zip(members, inputs, strict=True):
                one.found, one.x = (one.plan.inputs(x), 0), None
            return
        if together is None:
            shapes = [(plan.rows, plan.dtype, plan.form.stretches, aligned) for plan, aligned in key]
            together = _remember(self._together, key, Together(shapes, device))
        if capturing:
            self.keep(together)
        memory = _memory(together.size, device)
        together.add_up(inputs, memory)
        for one, start in zip(members, together.starts, strict=True):
            one.found, one.x = (memory, start), None

    def count(self, sums: Sums) -> None:
        """Has sums added to their layer's record when the backward that is running is through."""
        backward = current_backward()
        with self._lock:
            self._counted.append(sums)
            is_new = backward not in self._ends
            if is_new:
                self._ends = {backward}
        if is_new:
            at_end_of_backward(self._settle)

    def add_alone(self, tap: Tap, form: Form, sums: torch.Tensor) -> None:
        """Adds the sums of one call's input to its layer's record."""
        if tap.record is not None:
            _add_inputs_without_kernel(form, sums, tap.record)

    def forget(self) -> None:
        """Drops what a backward that has failed left behind."""
        self._counted.clear()

    def _settle(self) -> None:
        """Adds what layers have caught to their records; mostly that is one launch."""
        with self._lock:
            counted, self._counted, self._ends = self._counted, [], set()
        while counted:
            by_tap: dict[int, Sums] = {}
            later = [one for one in counted if by_tap.setdefault(id(one.tap), one) is not one]
            by_device: dict[torch.device, list[Sums]] = {}
            for one in by_tap.values():
                if one.tap.record is not None:
                    by_device.setdefault(one.plan.device, []).append(one)
            counted = later
            for device, members in by_device.items():
                with fused.on_device(device):
                    _wait_for_streams(members, device)
                    self._add_to_records(members, device)

    def _add_to_records(self, members: Sequence[Sums], device: torch.device) -> None:
        capturing = fused.is_capturing(device)
        records = [one.tap.record for one in members if one.tap.record is not None]
        key = (device, tuple((one.plan.form, record.data_ptr()) for one, record in zip(members, records, strict=True)))
        table = self._tables.get(key)
        if table is None and capturing:
            for one, record in zip(members, records, strict=True):
                _add_without_kernel(one, record)
            return
        if table is None:
            forms = [one.plan.form for one in members]
            programs, parts = record_tables(forms, records, range(0, 2 * len(forms), 2), device)
            new = _Table(programs, parts, Addresses(2 * len(forms), device), list(records))
            table = _remember(self._tables, key, new)
        if capturing:
            self.keep(table)
        kernels, flat = (import_module(f"gradweave.optim.{name}") for name in ("sum_kernels", "flat_kernels"))
        sums = [address for one in members for address in _addresses(one)]
        kernels.add_to_records[len(table.programs),](
            table.programs, table.parts, table.sums.holding(sums, flat, capturing=capturing, moves=True),
            AT_ONCE, COLUMNS,
        )  # fmt: skip


def _wait_for_streams(members: Sequence[Sums], device: torch.device) -> None:
    """Has this stream wait for those that sums were made on."""
    here = raw_stream(device)
    elsewhere = [one for one in members if one.stream != here]
    if not elsewhere:
        return
    stream = torch.cuda.current_stream(device)
    for number in {one.stream for one in elsewhere}:
        other = torch.cuda.ExternalStream(number, device) if number else torch.cuda.default_stream(device)
        stream.wait_stream(other)
    for one in elsewhere if not fused.is_capturing(device) else ():
        one.inputs.record_stream(stream)
        if one.outputs is not None:
            one.outputs.record_stream(stream)


def _remember(known: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(known) >= _MOST_SHAPES:
        known.clear()
    known[key] = value
    return value


def _addresses(one: Sums) -> tuple[int, int]:
    """Of the sums of inputs and of outputs."""
    return one.inputs.data_ptr() + 4 * one.start, 0 if one.outputs is None else one.outputs.data_ptr()


def _add_without_kernel(one: Sums, record: torch.Tensor) -> None:
    """The same by torch's operations, for a graph that is captured before a backward like it has run."""
    form = one.plan.form
    _add_inputs_without_kernel(form, one.inputs[one.start : one.start + form.stretches * form.columns], record)
    if one.outputs is not None:
        record[form.columns + 1 :].add_(one.outputs.view(form.output_stretches, form.output_columns).sum(0))


def _add_inputs_without_kernel(form: Form, sums: torch.Tensor, record: torch.Tensor) -> None:
    record[: form.columns].add_(sums.view(form.stretches, form.columns).sum(0))
    record[form.columns].add_(form.count)
