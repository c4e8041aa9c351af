"""What layers give to their vectors on a GPU, outside of compilers: few launches for all of them.

A hook in front of the node that autograd has made of a layer's call sees each backward that comes by: as often as the
weight gets a gradient, whatever becomes of the output. Until then a layer's input waits, which autograd keeps for the
weight's gradient anyway; when backward reaches the first that waits, all of them are added up together. Inputs that
autograd does not keep as they are (another precision than autocast computes in, patches of a padded copy) wait within
a bound of bytes, and are added up together when it is reached; under activation checkpointing they are added up at
once. Outputs' gradients are added up when they come by. At the end of each backward everything is added to the layers'
records, in one more launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib import import_module
from operator import mul
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from gradweave.compat.eager import (
    at_end_of_backward,
    current_backward,
    is_watched,
    lasting_node,
    raw_stream,
    saved_tensors_are_hooked,
    version_of,
)
from gradweave.optim import fused
from gradweave.optim.addresses import Addresses
from gradweave.optim.layouts import CONVOLUTION, LINEAR, TRANSPOSED
from gradweave.optim.sum_tables import AT_ONCE, COLUMNS, Form, Together, is_aligned, record_tables
from gradweave.optim.sums import Launcher, Rows, is_narrow, launcher, rows_of, samples_first

if TYPE_CHECKING:
    from gradweave.optim.capture import Tap

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BESIDE_OTHERS = 128
"""Programs for one of many tensors that are added up together."""
_HELD_BYTES = 64 << 20
"""Of inputs that autograd does not keep, together."""
_MOST_SHAPES = 64
"""How many shapes are remembered."""


class Plan:
    """What is done with calls of a layer whose inputs and outputs are alike.

    Attributes:
        form: Of its sums.
        device: Where it is.
        rows: Of its input.
        dtype: Of its input.
        made: The shape of its output.
        held_bytes: Of its input, if autograd does not keep it; else 0.
        may_wait: Whether its input can be added up with others, later; None if it is to be found out: what autograd
            does not keep may be changed in place.
    """

    def __init__(
        self, tap: Tap, x: torch.Tensor, made: torch.Size, rows: Rows, form: Form, share: float, *, is_kept: bool
    ) -> None:
        self.form, self.device, self.rows, self.dtype, self.made = form, x.device, rows, x.dtype, made
        narrow = is_narrow(rows, x, len(tap.layout.windows))
        self._add_inputs = (samples_first if narrow else launcher)(rows, form.stretches)
        self.held_bytes = 0 if is_kept else x.numel() * x.element_size()
        self.may_wait: bool | None = False if narrow else True if is_kept else None
        self._share = share
        self._add_outputs: dict[Any, Launcher] = {}

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """The sums of an input by itself."""
        sums = _memory(self.form.stretches * self.form.columns, self.device)
        with fused.on_device(self.device):
            self._add_inputs(x, sums)
        return sums

    def outputs(self, gradient: torch.Tensor, tap: Tap) -> torch.Tensor:
        """The sums of the gradient of an output."""
        gradient = gradient.resolve_neg()
        key = (gradient.stride(), gradient.dtype)
        add = self._add_outputs.get(key)
        if add is None:
            rows = rows_of(gradient, tap.layout, tap.output_count(gradient))
            if rows is None:
                return self.outputs(gradient.contiguous(), tap)
            add = self._add_outputs[key] = launcher(rows, self.form.output_stretches, self._share)
        sums = _memory(self.form.output_stretches * self.form.output_columns, self.device)
        with fused.on_device(self.device):
            add(gradient, sums)
        return sums

    def no_outputs(self) -> torch.Tensor:
        """The sums of an output that has no gradient."""
        return _memory(self.form.output_stretches * self.form.output_columns, self.device).zero_()


def _memory(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float32, device=device)


class Call:
    """One call of a layer, from its forward until its graph is gone; what autograd's node calls when backward comes by.

    Attributes:
        plan: What is done with its input.
        stream: That it ran on.
        x: Its input, while that waits.
        found: The memory of its input's sums, and where they begin.
    """

    __slots__ = ("__weakref__", "_output", "_tap", "_version", "found", "plan", "stream", "x")

    def __init__(self, tap: Tap, plan: Plan, x: torch.Tensor, output: int) -> None:
        self._tap, self.plan, self._output = tap, plan, output
        self.stream = raw_stream(plan.device)
        self.x: torch.Tensor | None = x
        self._version = version_of(x)
        self.found: tuple[torch.Tensor, int] | None = None

    @property
    def is_as_it_was(self) -> bool:
        """Whether its input is still there, and has not been changed in place while it waited."""
        x = self.x
        return x is not None and version_of(x) == self._version

    def add_up_at_once(self) -> None:
        """Adds up its input by itself, if it is as it was."""
        x = self.x
        if x is not None and version_of(x) == self._version:
            self.found = self.plan.inputs(x), 0

    def __call__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Before backward comes to what autograd needs of this call."""
        tap, plan = self._tap, self.plan
        if self.found is None:
            tap.catcher.add_up_with(self)
            if self.found is None:
                self.add_up_at_once()  # another thread's backward has taken it along, and is not through
        elif self.x is not None:  # it was held to see whether it may be: added up already
            plan.may_wait, self.x = self.is_as_it_was, None
        if self.found is None:
            plan.may_wait = False
            return
        outputs = None
        if plan.form.output_columns:
            gradient = gradients[self._output]
            with torch.no_grad():
                outputs = plan.no_outputs() if gradient is None else plan.outputs(gradient.reshape(plan.made), tap)
        memory, start = self.found
        tap.catcher.count(Sums(tap, plan, memory, start, outputs, raw_stream(plan.device)))


class Sums(NamedTuple):
    """What one backward through a layer gave."""

    tap: Tap
    plan: Plan
    inputs: torch.Tensor
    start: int
    outputs: torch.Tensor | None
    stream: int


def catch(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Has backward count what a layer's vectors are made of; False where kernels do not apply."""
    record = tap.record
    if type(x) not in _PLAIN or type(y) is not torch.Tensor or tap.masking.mask is not None or is_watched():
        return False
    if record is None or record.device != x.device or record.dtype is not torch.float32 or x.is_neg():
        return False
    found = lasting_node(y)
    plan = None if found is None else _plan_of(tap, x, y)
    if found is None or plan is None:
        return False
    if fused.is_capturing(plan.device):
        tap.catcher.keep(plan)
    node, output = found
    call = Call(tap, plan, x.detach(), output)
    if saved_tensors_are_hooked() or not plan.may_wait:
        call.add_up_at_once()
        if plan.may_wait is not None or saved_tensors_are_hooked():
            call.x = None
    else:
        tap.catcher.wait(call)
    node.register_prehook(call)
    return True


def _plan_of(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> Plan | None:
    key = (x.shape, x.stride(), x.dtype, y.shape, y.dtype, x.device)
    if tap.last_plan is not None and tap.last_plan[0] == key:
        return tap.last_plan[1]  # type: ignore[no-any-return]
    plan: Plan | None = tap.plans.get(key)
    if plan is None:
        plan = _new_plan(tap, x, y)
        if plan is None:
            return None
        if len(tap.plans) >= _MOST_SHAPES:
            tap.plans.clear()
        tap.plans[key] = plan
    tap.last_plan = key, plan
    return plan


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
    stretches = replace(rows, count=rows.places).stretches() if narrow else rows.stretches(_BESIDE_OTHERS)
    form = Form(stretches, rows.columns, output_stretches, output_columns, count)
    return Plan(tap, x, y.shape, rows, form, tap.share_of(y), is_kept=_is_kept_by_autograd(tap, x, y))


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
        self._waiting: list[ref[Call]] = []
        self._most = _MOST_SHAPES
        self._held_bytes = 0
        self._counted: list[Sums] = []
        self._ends: set[int] = set()
        self._together: dict[Any, Together] = {}
        self._tables: dict[Any, _Table] = {}
        self._in_graphs: dict[int, Any] = {}

    def keep(self, *used: Any) -> None:
        """Keeps what a CUDA graph that is being captured will read whenever it is replayed."""
        self._in_graphs |= {id(one): one for one in used}

    def wait(self, one: Call) -> None:
        """Has an input added up with others, unless its graph is thrown away."""
        with self._lock:
            self._waiting.append(ref(one))
            self._held_bytes += one.plan.held_bytes
            is_full = self._held_bytes > _HELD_BYTES
            if len(self._waiting) > self._most:
                self._waiting = [other for other in self._waiting if other() is not None]
                self._most = 2 * len(self._waiting) + _MOST_SHAPES
        if is_full:
            here = (one.plan.device, one.stream)
            self._add_up_some(lambda call: call.plan.held_bytes > 0 and (call.plan.device, call.stream) == here)

    def add_up_with(self, one: Call) -> None:
        """Adds up an input that has waited, with all that wait on its stream."""
        here = (one.plan.device, one.stream)
        self._add_up_some(lambda call: (call.plan.device, call.stream) == here)

    def _add_up_some(self, wanted: Callable[[Call], bool]) -> None:
        """Adds up inputs that wait, all on one stream; what was changed in place meanwhile is let go."""
        with self._lock:
            alive = [call for reference in self._waiting if (call := reference()) is not None]
            chosen = [call for call in alive if wanted(call)]
            left = [call for call in alive if not wanted(call)] if len(chosen) < len(alive) else []
            self._waiting = [ref(call) for call in left]
            self._held_bytes = sum(call.plan.held_bytes for call in left)
        members = [call for call in chosen if call.is_as_it_was]
        for call in chosen if len(members) < len(chosen) else ():
            if not call.is_as_it_was:
                call.plan.may_wait, call.x = False, None
        if members:
            with torch.no_grad(), fused.on_device(members[0].plan.device):
                self._add_up(members, members[0].plan.device)

    def _add_up(self, members: Sequence[Call], device: torch.device) -> None:
        inputs = [one.x for one in members if one.x is not None]
        key = tuple((one.plan, is_aligned(one.plan.rows, x)) for one, x in zip(members, inputs, strict=True))
        together = self._together.get(key)
        capturing = fused.is_capturing(device)
        if together is None and capturing:
            for one in members:
                one.add_up_at_once()
                one.x = None
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
            programs, parts = record_tables(forms, records, device)
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
    inputs = one.inputs[one.start : one.start + form.stretches * form.columns]
    record[: form.columns].add_(inputs.view(form.stretches, form.columns).sum(0))
    record[form.columns].add_(form.count)
    if one.outputs is not None:
        record[form.columns + 1 :].add_(one.outputs.view(form.output_stretches, form.output_columns).sum(0))
