"""Statistics of layers on a GPU, outside of compilers: what their vectors are made of, in few launches for all layers.

A hook in front of the autograd node of a layer's call sees every backward that passes: as many as the weight gets
gradients, whatever becomes of the output. Until then the layer's input waits, which autograd keeps for the weight's
gradient anyway, or the copy of it that autocast has made. When backward reaches the first call that waits, the inputs
of all of them are added up together.

Inputs that autograd does not keep as they are (it may keep a padded copy, or one in another precision that cannot be
found) wait within a bound of bytes, and are added up together when it is reached; under activation checkpointing inputs
are added up at once. Gradients of outputs are added up as backward passes. At the end of each backward everything is
added to the layers' records, in one more launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import ref

import torch

from gradweave._compat.autograd import (
    kept_copy,
    lasting_node,
    saved_tensors_hooks,
)
from gradweave._compat.functions import dispatch_modes
from gradweave._compat.tensors import stream_teller, version_of
from gradweave._runtime.backward import BackwardEnd
from gradweave.optim.kernels.launch import (
    VECTORIZED_BYTES,
    AddressTable,
    has_kernels,
    is_capturing,
    on_device,
    triton_module,
)
from gradweave.optim.kernels.sums import (
    RowLayout,
    SumFunction,
    image_layout,
    make_sum,
    make_two_stage_sum,
    prefers_two_stages,
    row_layout,
)
from gradweave.optim.kernels.sums_tables import (
    RECORD_COLUMNS,
    SPLITS_AT_ONCE,
    BatchedSum,
    Operand,
    SumShape,
    image_count,
    make_record_tables,
)
from gradweave.optim.statistics.geometry import CONVOLUTION, LINEAR, TRANSPOSED

if TYPE_CHECKING:
    from gradweave.optim.statistics.hooks import Tap

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROGRAMS_IN_BATCH = 128
"""Programs for each of the tensors that are added up together."""
_MAX_RETAINED_BYTES = 64 << 20
"""Bound on inputs that wait and that autograd does not keep, together."""
_MAX_SHAPES = 64
"""Number of shapes that are remembered, in each of several caches."""

_V = TypeVar("_V")


class LayerPlan:
    """How to add up calls of one layer whose inputs and outputs are alike.

    Args:
        tap: The layer's hook.
        x: An input.
        y: The output that belongs to it.
        rows: Rows of the input.
        shape: Shape of its sums.
        is_kept: Whether autograd keeps the input as it is until backward.

    Attributes:
        shape: Shape of the sums.
        device: Device of the input.
        rows: Rows of the input.
        dtype: Precision of the input.
        has_outputs: Whether gradients of outputs are added up too.
        current_stream: Function that returns the number of the current stream.
        retained_bytes: Size of the input if autograd does not keep it; else 0.
        may_wait: Whether the input can be added up later, with others. None until it has been found out: an input that
            autograd does not keep may be changed in place before backward.
    """

    def __init__(
        self, tap: Tap, x: torch.Tensor, y: torch.Tensor, rows: RowLayout, shape: SumShape, *, is_kept: bool
    ) -> None:
        self.shape, self.device, self.rows, self.dtype = shape, x.device, rows, x.dtype
        self._input_shape, self._input_strides = x.shape, x.stride()
        self._output_shape, self._output_dtype = y.shape, y.dtype
        self.has_outputs = shape.output_columns > 0
        self.current_stream = stream_teller(x.device)
        self.retained_bytes = 0 if is_kept else x.numel() * x.element_size()
        self.may_wait: bool | None = True if is_kept else None
        self._sum_inputs = (make_two_stage_sum if prefers_two_stages(rows) else make_sum)(rows, shape.splits)
        self._output_factor = tap.share_of(y)
        self._sum_outputs: dict[tuple[tuple[int, ...], torch.dtype], SumFunction] = {}

    def matches(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Return whether the plan is for calls with such an input and output."""
        return (
            x.shape == self._input_shape
            and x.stride() == self._input_strides
            and x.dtype is self.dtype
            and x.device == self.device
            and y.dtype is self._output_dtype
            and y.shape == self._output_shape
        )

    def sum_inputs(self, x: torch.Tensor, tap: Tap) -> torch.Tensor:
        """Return the sums of one input, in launches of its own."""
        self._keep_for_graph(tap)
        sums = _empty(self.shape.splits * self.shape.columns, self.device)
        with on_device(self.device):
            self._sum_inputs(x, sums)
        return sums

    def sum_outputs(self, gradient: torch.Tensor | None, tap: Tap) -> torch.Tensor:
        """Return the sums of the gradient of an output; zeros if it has none."""
        size = self.shape.output_splits * self.shape.output_columns
        if gradient is None:
            return _empty(size, self.device).zero_()
        self._keep_for_graph(tap)
        gradient = gradient.reshape(self._output_shape)
        gradient = gradient.resolve_neg()
        key = (gradient.stride(), gradient.dtype)
        add_up = self._sum_outputs.get(key)
        if add_up is None:
            rows = row_layout(gradient, tap.layout, tap.output_count(gradient))
            if rows is None:
                return self.sum_outputs(gradient.contiguous(), tap)
            add_up = self._sum_outputs[key] = make_sum(rows, self.shape.output_splits, self._output_factor)
        sums = _empty(size, self.device)
        with on_device(self.device):
            add_up(gradient, sums)
        return sums

    def _keep_for_graph(self, tap: Tap) -> None:
        # Launches read this plan's counts of taps, at each replay too.
        if is_capturing(self.device):
            tap.gpu_statistics.keep_for_graph(self)


def _empty(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float32, device=device)


class LayerCall:
    """One call of a layer, and the hook of its autograd node: it lives from the call until the graph is freed.

    An input is in one of these states, from the call until a backward passes:

    - waiting: ``x`` is there and ``sums`` are not; a batch will add it up.
    - added up: ``sums`` are there and ``x`` is not.
    - on probation: both are there; when backward passes, it turns out whether the input could have waited.
    - lost: neither is there; it was changed in place while it waited, and does not count.

    Args:
        tap: The layer's hook.
        plan: How to add up its input.
        x: The input, detached.
        output: Which output of the node is the layer's.
        is_apart: Whether the weight's gradient is computed apart from backward.

    Attributes:
        plan: How to add up its input.
        stream: Number of the stream that it ran on.
        x: The input, while it waits.
        sums: The memory of the input's sums, and where they begin in it.
    """

    __slots__ = ("__weakref__", "_is_apart", "_output", "_tap", "_version_then", "plan", "stream", "sums", "x")

    def __init__(self, tap: Tap, plan: LayerPlan, x: torch.Tensor, output: int, *, is_apart: bool) -> None:
        self._tap, self.plan, self._output, self._is_apart = tap, plan, output, is_apart
        self.stream = plan.current_stream()
        self.x: torch.Tensor | None = x
        self._version_then = version_of(x)
        self.sums: tuple[torch.Tensor, int] | None = None

    @property
    def is_intact(self) -> bool:
        """Whether the input is still there, and has not been changed in place since the call."""
        x = self.x
        return x is not None and version_of(x) == self._version_then

    def sum_alone(self) -> None:
        """Add up the input by itself, if it is intact."""
        x = self.x
        if x is not None and version_of(x) == self._version_then:
            self.sums = self.plan.sum_inputs(x, self._tap), 0

    def __call__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run before backward computes what autograd needs of this call.

        Args:
            gradients: Gradients of the node's outputs.
        """
        plan, statistics = self.plan, self._tap.gpu_statistics
        if not self._tap.is_counted(is_apart=self._is_apart):
            return
        if self.sums is None:
            statistics.sum_batch_of(self)
            if self.sums is None:
                self.sum_alone()  # the backward of another thread has taken it into its batch, and is not through
        elif self.x is not None:  # on probation
            plan.may_wait, self.x = self.is_intact, None
        if self.sums is None:
            plan.may_wait = False
            return
        outputs = None
        if plan.has_outputs:
            with torch.no_grad():
                outputs = plan.sum_outputs(gradients[self._output], self._tap)
        statistics.record_at_end(CallSums(self._tap, plan, self.sums, outputs, plan.current_stream()))


class CallSums(NamedTuple):
    """Sums of one backward through a call."""

    tap: Tap
    plan: LayerPlan
    inputs: tuple[torch.Tensor, int]
    """The memory of the sums, and where they begin in it."""
    outputs: torch.Tensor | None
    stream: int
    """Number of the stream that they were made on."""


def observe_call(tap: Tap, x: torch.Tensor, y: torch.Tensor, *, is_alone: bool, is_apart: bool) -> bool:
    """Have backward add up what a layer's vectors are made of; return False where kernels do not apply.

    Every layer of every forward comes here: the usual case is checked first, and in few calls.

    Args:
        tap: The layer's hook.
        x: Its input.
        y: Its output.
        is_alone: Whether the layer has no other hook, which could have changed the output or its autograd node.
        is_apart: Whether its weight's gradient is computed apart from backward.
    """
    if (
        type(x) not in _PLAIN_TYPES
        or type(y) is not torch.Tensor
        or tap.masking.mask is not None
        or dispatch_modes()
        or x.is_neg()
    ):
        return False
    found, plan = lasting_node(y), tap.last_plan
    if found is None:
        return False
    node, output = found
    if is_alone and x.dtype is not y.dtype and has_kernels(x.device):
        x = _multiplied_input(tap, node, x, y)
    if plan is None or not plan.matches(x, y):
        plan = tap.last_plan = _plan_of(tap, x, y)
        if plan is None:
            return False
    call = LayerCall(tap, plan, x.detach(), output, is_apart=is_apart)
    # Under activation checkpointing, autograd hands over what it saves, to be dropped: inputs that waited would stay.
    if plan.may_wait and saved_tensors_hooks() is None:
        tap.gpu_statistics.enqueue(call)
    else:
        call.sum_alone()
        if plan.may_wait is not None or saved_tensors_hooks() is not None:
            call.x = None
    # The node owns the hook, which holds the input no longer than the node would: until its graph is freed. Of the node
    # the hook holds nothing, or they would be a cycle that only the garbage collector frees.
    node.register_prehook(call)
    return True


def _multiplied_input(tap: Tap, node: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return what a layer's weight was multiplied with: under autocast a copy of the input, which autograd keeps.

    It is the input itself where the copy cannot be found.
    """
    if saved_tensors_hooks() is not None:
        return x
    copy = kept_copy(node)
    if copy is None or type(copy) is not torch.Tensor or copy.dtype is not y.dtype or copy.numel() != x.numel():
        return x
    has_same_rows = copy.shape == x.shape or (tap.options.input_samples is None and copy.shape[-1] == x.shape[-1])
    return copy if has_same_rows else x


def _plan_of(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> LayerPlan | None:
    record = tap.record
    if record is None or record.device != x.device or record.dtype is not torch.float32:
        return None
    key = (x.shape, x.stride(), x.dtype, y.shape, y.dtype, x.device)
    plan: LayerPlan | None = tap.plans.get(key)
    if plan is None:
        plan = _new_plan(tap, x, y)
        if plan is not None:
            _remember(tap.plans, key, plan)
    return plan


def _new_plan(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> LayerPlan | None:
    layout = tap.layout
    if x.dtype not in _DTYPES or y.dtype not in _DTYPES or not has_kernels(x.device):
        return None
    if layout.kind == TRANSPOSED and tap.with_outputs:
        return None
    windows = layout.windows if layout.kind == CONVOLUTION else ()
    rows = row_layout(x, layout, tap.options.input_samples, windows)
    if rows is None:
        return None
    output_splits = output_columns = 0
    if tap.with_outputs:
        outputs = row_layout(torch.empty(y.shape, device="meta"), layout, tap.output_count(y))
        if outputs is None:
            return None
        output_splits, output_columns = outputs.splits(), outputs.columns
    places = rows.count
    if windows:  # places of the output; those of the input are not as many
        seen = (window.places(size) for window, size in zip(windows, x.shape[-len(windows) :], strict=True))
        samples = x.shape[0] if x.dim() == len(windows) + 2 else 1
        places = reduce(mul, seen, min(samples, tap.options.input_samples or samples))
    images = image_count(rows)
    splits = (image_layout(rows, images) if images else rows).splits(_PROGRAMS_IN_BATCH)
    shape = SumShape(splits, rows.columns, output_splits, output_columns, places)
    return LayerPlan(tap, x, y, rows, shape, is_kept=_is_kept_by_autograd(tap, x, y))


def _is_kept_by_autograd(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether autograd saves the input itself for the weight's gradient, and not a copy of it."""
    if x.dtype != y.dtype:
        return False
    if tap.layout.kind == LINEAR:
        return x.dim() == 2 or (x.dim() > 2 and x.is_contiguous())
    return all(window.mode == "zeros" and window.before == window.after for window in tap.layout.windows)


@dataclass
class _RecordLaunch:
    """A launch that adds sums to records.

    Attributes:
        programs: Table of programs.
        parts: Table of parts.
        sums: Addresses of sums.
        records: The records, of which parts hold the addresses.
    """

    programs: torch.Tensor
    parts: torch.Tensor
    sums: AddressTable
    records: list[torch.Tensor]


class GpuStatistics:
    """The statistics of all layers of one optimizer, on GPUs.

    Autograd has a thread for each device, and users may have several: a lock guards what waits and what is to be
    recorded. Nothing is launched while it is held.

    Args:
        on_forward: Function to be called in each forward, by each layer; None for nothing.

    Attributes:
        on_forward: The same.
    """

    def __init__(self, on_forward: Callable[[], None] | None = None) -> None:
        self.on_forward = on_forward
        self._lock = Lock()
        # Weakly: calls of a graph that is thrown away go with it.
        self._waiting: list[ref[LayerCall]] = []
        self._prune_at = _MAX_SHAPES
        self._retained_bytes = 0
        self._to_record: list[CallSums] = []
        self._end = BackwardEnd(self._record)
        self._batches: dict[Any, BatchedSum] = {}
        self._record_launches: dict[Any, _RecordLaunch] = {}
        self._in_graphs: dict[int, object] = {}

    def keep_for_graph(self, *used: object) -> None:
        """Keep what a CUDA graph that is being captured reads whenever it is replayed."""
        self._in_graphs |= {id(one): one for one in used}

    def enqueue(self, call: LayerCall) -> None:
        """Have an input added up with others, unless its graph is thrown away."""
        retained = call.plan.retained_bytes
        with self._lock:
            self._waiting.append(ref(call))
            if not retained and len(self._waiting) <= self._prune_at:
                return
            self._retained_bytes += retained
            is_full = self._retained_bytes > _MAX_RETAINED_BYTES
            # Forwards without a backward leave dead references; the bound doubles, for a constant cost per call.
            if len(self._waiting) > self._prune_at:
                self._waiting = [other for other in self._waiting if other() is not None]
                self._prune_at = 2 * len(self._waiting) + _MAX_SHAPES
        if is_full:
            self._sum_waiting(call.plan.device, call.stream, only_retained=True)

    def sum_batch_of(self, call: LayerCall) -> None:
        """Add up an input that has waited, with all others that wait on its stream."""
        self._sum_waiting(call.plan.device, call.stream)

    def _sum_waiting(self, device: torch.device, stream: int, *, only_retained: bool = False) -> None:
        """Add up inputs that wait on one stream; drop those that were changed in place meanwhile.

        Only of one stream: backward of a node runs on the stream of its forward, and there alone is an input ready.
        """
        chosen: list[LayerCall] = []
        left: list[LayerCall] = []
        with self._lock:
            for reference in self._waiting:
                call = reference()
                if call is not None:
                    plan = call.plan
                    is_chosen = (
                        call.stream == stream and plan.device == device and (plan.retained_bytes or not only_retained)
                    )
                    (chosen if is_chosen else left).append(call)
            self._waiting = [ref(call) for call in left]
            self._retained_bytes = sum(call.plan.retained_bytes for call in left)
        members = [call for call in chosen if call.is_intact]
        for call in chosen if len(members) < len(chosen) else ():
            if not call.is_intact:
                call.plan.may_wait, call.x = False, None
        if members:
            with torch.no_grad(), on_device(device):
                self._sum_batch(members, device)

    def _sum_batch(self, calls: Sequence[LayerCall], device: torch.device) -> None:
        addresses = [call.x.data_ptr() for call in calls if call.x is not None]
        misaligned = tuple(number for number, address in enumerate(addresses) if address % VECTORIZED_BYTES)
        key = (misaligned, *[call.plan for call in calls])
        batch = self._batches.get(key)
        capturing = is_capturing(device)
        if batch is None and capturing:  # tables cannot be copied to the device then
            for call in calls:
                call.sum_alone()
                call.x = None
            return
        if batch is None:
            operands = [
                Operand(call.plan.rows, call.plan.dtype, call.plan.shape.splits, not address % VECTORIZED_BYTES)
                for call, address in zip(calls, addresses, strict=True)
            ]
            batch = _remember(self._batches, key, BatchedSum(operands, device))
        if capturing:
            self.keep_for_graph(batch)
        memory = _empty(batch.size, device)
        batch.add_up(addresses, memory)
        for call, offset in zip(calls, batch.offsets, strict=True):
            call.sums, call.x = (memory, offset), None

    def record_at_end(self, sums: CallSums) -> None:
        """Have sums added to their layer's record at the end of the backward that is running."""
        with self._lock:
            self._to_record.append(sums)
        # Noted outside the lock: two threads of one backward may both ask, and the second call finds nothing left.
        self._end.note()

    def discard(self) -> None:
        """Drop the sums of a backward that has failed."""
        self._to_record.clear()

    def _record(self, _: int) -> None:
        """Add sums to the layers' records; mostly in one launch for all."""
        with self._lock:
            left, self._to_record = self._to_record, []
        while left:
            # Programs of a launch run in any order: one launch has each record once.
            by_tap: dict[int, CallSums] = {}
            later = [sums for sums in left if by_tap.setdefault(id(sums.tap), sums) is not sums]
            by_device: dict[torch.device, list[CallSums]] = {}
            for sums in by_tap.values():
                if sums.tap.record is not None:
                    by_device.setdefault(sums.plan.device, []).append(sums)
            left = later
            for device, members in by_device.items():
                with on_device(device):
                    _wait_for_streams(members, device)
                    self._add_to_records(members, device)

    def _add_to_records(self, members: Sequence[CallSums], device: torch.device) -> None:
        capturing = is_capturing(device)
        records = [sums.tap.record for sums in members if sums.tap.record is not None]
        key = (device, *[sums.plan for sums in members], *[record.data_ptr() for record in records])
        launch = self._record_launches.get(key)
        if launch is None and capturing:  # tables cannot be copied to the device then
            self.keep_for_graph(*records)
            for sums, record in zip(members, records, strict=True):
                _add_without_kernel(sums, record)
            return
        if launch is None:
            shapes = [sums.plan.shape for sums in members]
            programs, parts = make_record_tables(shapes, records, device)
            new = _RecordLaunch(programs, parts, AddressTable(2 * len(shapes), device), records)
            launch = _remember(self._record_launches, key, new)
        if capturing:
            self.keep_for_graph(launch)
        addresses = [address for sums in members for address in _addresses(sums)]
        triton_module("sums_triton").add_to_records[len(launch.programs),](
            launch.programs,
            launch.parts,
            launch.sums.write(addresses, capturing=capturing, changes_each_step=True),
            SPLITS_AT_ONCE,
            RECORD_COLUMNS,
        )


def _wait_for_streams(members: Sequence[CallSums], device: torch.device) -> None:
    """Have the current stream wait for those that sums were made on: backward's callbacks run on one stream."""
    current = members[0].plan.current_stream()
    elsewhere = [sums for sums in members if sums.stream != current]
    if not elsewhere:
        return
    stream = torch.cuda.current_stream(device)
    for number in {sums.stream for sums in elsewhere}:
        other = torch.cuda.ExternalStream(number, device) if number else torch.cuda.default_stream(device)
        stream.wait_stream(other)
    # Otherwise the allocator would give the memory back to the stream that it belongs to as soon as Python drops it,
    # though the current stream may not have read it yet.
    for sums in elsewhere if not is_capturing(device) else ():
        sums.inputs[0].record_stream(stream)
        if sums.outputs is not None:
            sums.outputs.record_stream(stream)


def _remember(known: dict[Any, _V], key: object, value: _V) -> _V:
    """Add a value to a cache, which is emptied when it is full."""
    if len(known) >= _MAX_SHAPES:
        known.clear()
    known[key] = value
    return value


def _addresses(sums: CallSums) -> tuple[int, int]:
    """Return the addresses of the sums of inputs and of outputs."""
    memory, start = sums.inputs
    return memory.data_ptr() + 4 * start, 0 if sums.outputs is None else sums.outputs.data_ptr()


def _add_without_kernel(sums: CallSums, record: torch.Tensor) -> None:
    """Add sums to a record by torch's operations, in a graph that is captured before a backward like it has run."""
    shape = sums.plan.shape
    memory, start = sums.inputs
    inputs = memory[start : start + shape.splits * shape.columns]
    record[: shape.columns].add_(inputs.view(shape.splits, shape.columns).sum(0))
    record[shape.columns].add_(shape.places)
    if sums.outputs is not None:
        record[shape.columns + 1 :].add_(sums.outputs.view(shape.output_splits, shape.output_columns).sum(0))
