"""What layers give to their vectors on a GPU, outside of compilers: few launches for all of them.

A hook in front of the node that autograd has made of a layer's call sees each backward that comes by: as often as the
weight gets a gradient, whatever becomes of the output. Until then a layer's input waits, which autograd keeps for the
weight's gradient anyway, or what autocast has made of it; when backward reaches the first that waits, all of them are
added up together. Inputs that autograd does not keep as they are (patches of a padded copy, another precision behind
which no copy is found) wait within a bound of bytes, and are added up together when it is reached; under activation
checkpointing they are added up at once. Outputs' gradients are added up when they come by. At the end of each backward
everything is added to the layers' records, in one more launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from operator import mul
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from gradweave._compat.eager import (
    NO_BACKWARD,
    at_end_of_backward,
    current_backward,
    kept_copy,
    lasting_node,
    saved_tensors_hooks,
    stream_teller,
    version_of,
    watchers,
)
from gradweave.optim.kernels import step as fused
from gradweave.optim.kernels.addresses import Addresses
from gradweave.optim.kernels.sums import Launcher, Rows, images_of, is_narrow, launcher, rows_of, samples_first
from gradweave.optim.kernels.sums_tables import (
    AT_ONCE,
    COLUMNS,
    WIDE,
    Form,
    Member,
    Together,
    parts_of,
    record_tables,
)
from gradweave.optim.statistics.geometry import CONVOLUTION, LINEAR, TRANSPOSED

if TYPE_CHECKING:
    from gradweave.optim.statistics.hooks import Tap

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
        with_outputs: Whether its output's gradient is added up too.
        current_stream: Tells the stream that work goes to.
        held_bytes: Of its input, if autograd does not keep it; else 0.
        may_wait: Whether its input can be added up with others, later; None if it is to be found out: what autograd
            does not keep may be changed in place.
    """

    def __init__(self, tap: Tap, x: torch.Tensor, y: torch.Tensor, rows: Rows, form: Form, *, is_kept: bool) -> None:
        self.form, self.device, self.rows, self.dtype, self.made = form, x.device, rows, x.dtype, y.shape
        self._shape, self._strides, self._made_of = x.shape, x.stride(), y.dtype
        self.with_outputs, self.current_stream = form.output_columns > 0, stream_teller(x.device)
        self._add_inputs = (samples_first if is_narrow(rows) else launcher)(rows, form.stretches)
        self.held_bytes = 0 if is_kept else x.numel() * x.element_size()
        self.may_wait: bool | None = True if is_kept else None
        self._share = tap.share_of(y)
        self._add_outputs: dict[Any, Launcher] = {}

    def is_for(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether a call is alike."""
        return (
            x.shape == self._shape
            and x.stride() == self._strides
            and x.dtype is self.dtype
            and x.device == self.device
            and y.dtype is self._made_of
            and y.shape == self.made
        )

    def inputs(self, x: torch.Tensor, tap: Tap) -> torch.Tensor:
        """The sums of an input by itself."""
        self._leave_to_graph(tap)
        sums = _memory(self.form.stretches * self.form.columns, self.device)
        with fused.on_device(self.device):
            self._add_inputs(x, sums)
        return sums

    def outputs(self, gradient: torch.Tensor | None, tap: Tap) -> torch.Tensor:
        """The sums of the gradient of an output, or zeros if it has none."""
        if gradient is None:
            return _memory(self.form.output_stretches * self.form.output_columns, self.device).zero_()
        self._leave_to_graph(tap)
        gradient = gradient.reshape(self.made)
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

    def _leave_to_graph(self, tap: Tap) -> None:
        """A graph that is being captured goes on reading what launches read."""
        if fused.is_capturing(self.device):
            tap.catcher.keep(self)


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

    __slots__ = ("__weakref__", "_is_apart", "_output", "_tap", "_version", "found", "plan", "stream", "x")

    def __init__(self, tap: Tap, plan: Plan, x: torch.Tensor, output: int, *, is_apart: bool) -> None:
        self._tap, self.plan, self._output, self._is_apart = tap, plan, output, is_apart
        self.stream = plan.current_stream()
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
            self.found = self.plan.inputs(x, self._tap), 0

    def __call__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Before backward comes to what autograd needs of this call."""
        plan, catcher = self.plan, self._tap.catcher
        if not self._tap.is_counted(is_apart=self._is_apart):
            return
        if self.found is None:
            catcher.add_up_with(self)
            if self.found is None:
                self.add_up_at_once()  # another thread's backward has taken it along, and is not through
        elif self.x is not None:  # it was held to see whether it may be: added up already
            plan.may_wait, self.x = self.is_as_it_was, None
        if self.found is None:
            plan.may_wait = False
            return
        outputs = None
        if plan.with_outputs:
            with torch.no_grad():
                outputs = plan.outputs(gradients[self._output], self._tap)
        catcher.count((self._tap, plan, self.found, outputs, plan.current_stream()))


class Sums(NamedTuple):
    """What one backward through a layer gave."""

    tap: Tap
    plan: Plan
    found: tuple[torch.Tensor, int]
    outputs: torch.Tensor | None
    stream: int


def catch(tap: Tap, x: torch.Tensor, y: torch.Tensor, *, is_alone: bool, is_apart: bool) -> bool:
    """Has backward count what a layer's vectors are made of; False where kernels do not apply.

    Every layer of every forward comes by here: what is usual is asked first, and in few calls.

    Args:
        tap: Of the layer.
        x: Its input.
        y: Its output.
        is_alone: Whether no other hook can have changed the output, or who keeps what autograd saves.
        is_apart: Whether its weight's gradient is computed apart from backward.
    """
    if type(x) not in _PLAIN or type(y) is not torch.Tensor or tap.masking.mask is not None or watchers() or x.is_neg():
        return False
    found, plan = lasting_node(y), tap.last_plan
    if found is None:
        return False
    node, output = found
    if is_alone and x.dtype is not y.dtype and fused.has_kernels(x.device):
        x = _multiplied(tap, node, x, y)
    if plan is None or not plan.is_for(x, y):
        plan = tap.last_plan = _plan_of(tap, x, y)
        if plan is None:
            return False
    call = Call(tap, plan, x.detach(), output, is_apart=is_apart)
    if plan.may_wait and saved_tensors_hooks() is None:
        tap.catcher.wait(call)
    else:
        call.add_up_at_once()
        if plan.may_wait is not None or saved_tensors_hooks() is not None:
            call.x = None
    node.register_prehook(call)
    return True


def _multiplied(tap: Tap, node: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What a layer was really applied to: under autocast a copy of its input, which autograd keeps anyway."""
    if saved_tensors_hooks() is not None:
        return x
    copy = kept_copy(node)
    if copy is None or type(copy) is not torch.Tensor or copy.dtype is not y.dtype or copy.numel() != x.numel():
        return x
    is_alike = copy.shape == x.shape or (tap.catching.input_samples is None and copy.shape[-1] == x.shape[-1])
    return copy if is_alike else x


def _plan_of(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> Plan | None:
    record = tap.record
    if record is None or record.device != x.device or record.dtype is not torch.float32:
        return None
    key = (x.shape, x.stride(), x.dtype, y.shape, y.dtype, x.device)
    plan: Plan | None = tap.plans.get(key)
    if plan is None:
        plan = _new_plan(tap, x, y)
        if plan is None:
            return None
        if len(tap.plans) >= _MOST_SHAPES:
            tap.plans.clear()
        tap.plans[key] = plan
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
    images = parts_of(rows)
    stretches = (images_of(rows, images) if images else rows).stretches(_BESIDE_OTHERS)
    form = Form(stretches, rows.columns, output_stretches, output_columns, count)
    return Plan(tap, x, y, rows, form, is_kept=_is_kept_by_autograd(tap, x, y))


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
    """What the layers of one optimizer do together.

    Args:
        look: To be called in each forward, by each layer; None for nothing.

    Attributes:
        look: The same.
    """

    def __init__(self, look: Callable[[], None] | None = None) -> None:
        self.look = look
        self._lock = Lock()
        self._waiting: list[ref[Call]] = []
        self._most = _MOST_SHAPES
        self._held_bytes = 0
        self._counted: list[tuple[Any, ...]] = []
        self._ends = NO_BACKWARD
        self._together: dict[Any, Together] = {}
        self._tables: dict[Any, _Table] = {}
        self._in_graphs: dict[int, Any] = {}

    def keep(self, *used: Any) -> None:
        """Keeps what a CUDA graph that is being captured will read whenever it is replayed."""
        self._in_graphs |= {id(one): one for one in used}

    def wait(self, one: Call) -> None:
        """Has an input added up with others, unless its graph is thrown away."""
        held = one.plan.held_bytes
        with self._lock:
            self._waiting.append(ref(one))
            if not held and len(self._waiting) <= self._most:
                return
            self._held_bytes += held
            is_full = self._held_bytes > _HELD_BYTES
            if len(self._waiting) > self._most:
                self._waiting = [other for other in self._waiting if other() is not None]
                self._most = 2 * len(self._waiting) + _MOST_SHAPES
        if is_full:
            here = (one.plan.device, one.stream)
            self._add_up_some(*here, only_held=True)

    def add_up_with(self, one: Call) -> None:
        """Adds up an input that has waited, with all that wait on its stream."""
        self._add_up_some(one.plan.device, one.stream)

    def _add_up_some(self, device: torch.device, stream: int, *, only_held: bool = False) -> None:
        """Adds up inputs that wait, all on one stream; what was changed in place meanwhile is let go."""
        chosen: list[Call] = []
        left: list[Call] = []
        with self._lock:
            for reference in self._waiting:
                call = reference()
                if call is not None:
                    plan = call.plan
                    here = call.stream == stream and plan.device == device and (plan.held_bytes or not only_held)
                    (chosen if here else left).append(call)
            self._waiting = [ref(call) for call in left]
            self._held_bytes = sum(call.plan.held_bytes for call in left)
        members = [call for call in chosen if call.is_as_it_was]
        for call in chosen if len(members) < len(chosen) else ():
            if not call.is_as_it_was:
                call.plan.may_wait, call.x = False, None
        if members:
            with torch.no_grad(), fused.on_device(device):
                self._add_up(members, device)

    def _add_up(self, members: Sequence[Call], device: torch.device) -> None:
        places = [one.x.data_ptr() for one in members if one.x is not None]
        odd = tuple(number for number, place in enumerate(places) if place % WIDE)
        key = (odd, *[one.plan for one in members])
        together = self._together.get(key)
        capturing = fused.is_capturing(device)
        if together is None and capturing:
            for one in members:
                one.add_up_at_once()
                one.x = None
            return
        if together is None:
            shapes = [
                Member(one.plan.rows, one.plan.dtype, one.plan.form.stretches, not place % WIDE)
                for one, place in zip(members, places, strict=True)
            ]
            together = _remember(self._together, key, Together(shapes, device))
        if capturing:
            self.keep(together)
        memory = _memory(together.size, device)
        together.add_up(places, memory)
        for one, start in zip(members, together.starts, strict=True):
            one.found, one.x = (memory, start), None

    def count(self, sums: tuple[Any, ...]) -> None:
        """Has :class:`Sums` added to their layer's record when the backward that is running is through."""
        backward = current_backward()
        with self._lock:
            self._counted.append(sums)
            if backward == self._ends:
                return
            self._ends = backward
        at_end_of_backward(self._settle)

    def forget(self) -> None:
        """Drops what a backward that has failed left behind."""
        self._counted.clear()

    def _settle(self) -> None:
        """Adds what layers have caught to their records; mostly that is one launch."""
        with self._lock:
            counted, self._counted, self._ends = list(map(Sums._make, self._counted)), [], NO_BACKWARD
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
        key = (device, *[one.plan for one in members], *[record.data_ptr() for record in records])
        table = self._tables.get(key)
        if table is None and capturing:
            self.keep(*records)
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
        kernels, flat = (
            import_module(f"gradweave.optim.kernels.{name}") for name in ("sums_triton", "first_order_triton")
        )
        sums = [address for one in members for address in _addresses(one)]
        kernels.add_to_records[len(table.programs),](
            table.programs, table.parts, table.sums.holding(sums, flat, capturing=capturing, moves=True),
            AT_ONCE, COLUMNS,
        )  # fmt: skip


def _wait_for_streams(members: Sequence[Sums], device: torch.device) -> None:
    """Has this stream wait for those that sums were made on."""
    here = members[0].plan.current_stream()
    elsewhere = [one for one in members if one.stream != here]
    if not elsewhere:
        return
    stream = torch.cuda.current_stream(device)
    for number in {one.stream for one in elsewhere}:
        other = torch.cuda.ExternalStream(number, device) if number else torch.cuda.default_stream(device)
        stream.wait_stream(other)
    for one in elsewhere if not fused.is_capturing(device) else ():
        one.found[0].record_stream(stream)
        if one.outputs is not None:
            one.outputs.record_stream(stream)


def _remember(known: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(known) >= _MOST_SHAPES:
        known.clear()
    known[key] = value
    return value


def _addresses(one: Sums) -> tuple[int, int]:
    """Of the sums of inputs and of outputs."""
    memory, start = one.found
    return memory.data_ptr() + 4 * start, 0 if one.outputs is None else one.outputs.data_ptr()


def _add_without_kernel(one: Sums, record: torch.Tensor) -> None:
    """The same by torch's operations, for a graph that is captured before a backward like it has run."""
    form = one.plan.form
    memory, start = one.found
    inputs = memory[start : start + form.stretches * form.columns]
    record[: form.columns].add_(inputs.view(form.stretches, form.columns).sum(0))
    record[form.columns].add_(form.count)
    if one.outputs is not None:
        record[form.columns + 1 :].add_(one.outputs.view(form.output_stretches, form.output_columns).sum(0))
