"""What layers give to their vectors on a GPU, outside of compilers: few launches for all of them.

Behind a layer's output is a tensor's hook, and nothing in the graph of the model. Until backward comes by, it holds the
layer's input, which autograd holds for the weight's gradient anyway; when backward reaches the first of them, all
inputs are added up together. Inputs that autograd does not hold as they are (of another precision than autocast
computes in, inside of activation checkpointing) are added up at once, layer by layer. Outputs' gradients are added up
when they come by. The step then adds everything to the layers' records, in one more launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib import import_module
from operator import mul
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from gradweave.compat.eager import is_watched, saves_tensors_otherwise
from gradweave.optim import fused
from gradweave.optim.addresses import Addresses
from gradweave.optim.layouts import CONVOLUTION, TRANSPOSED
from gradweave.optim.sum_tables import Together, is_aligned
from gradweave.optim.sums import Launcher, Rows, is_narrow, launcher, rows_of, samples_first

if TYPE_CHECKING:
    from gradweave.optim.capture import Tap

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BESIDE_OTHERS = 128
"""Programs for one of many tensors that are added up together."""
_COLUMNS, _AT_ONCE = 128, 16
_MOST_SHAPES = 64
"""How many shapes are remembered."""


@dataclass(frozen=True)
class Form:
    """What the sums of a layer are: stretches and columns of inputs and of outputs, and how many places they are of."""

    stretches: int
    columns: int
    output_stretches: int
    output_columns: int
    count: int


class Plan:
    """What is done with calls of a layer whose inputs and outputs are alike.

    Attributes:
        form: Of its sums.
        device: Where it is.
        rows: Of its input.
        dtype: Of its input.
        waits: Whether its input can be added up with others.
        add_inputs: Adds up an input by itself.
    """

    def __init__(self, tap: Tap, x: torch.Tensor, rows: Rows, form: Form, share: float, *, waits: bool) -> None:
        self.form, self.device, self.rows, self.dtype, self.waits = form, x.device, rows, x.dtype, waits
        narrow = is_narrow(rows, x, len(tap.layout.windows))
        self.add_inputs = (samples_first if narrow else launcher)(rows, form.stretches)
        self._share, self._layout = share, tap.layout
        self._add_outputs: dict[Any, Launcher] = {}

    def add_outputs(self, gradient: torch.Tensor, samples: int | None, out: torch.Tensor) -> None:
        """Adds up the gradient of an output."""
        key = (gradient.stride(), gradient.dtype)
        add = self._add_outputs.get(key)
        if add is None:
            rows = rows_of(gradient, self._layout, samples)
            if rows is None:
                self.add_outputs(gradient.contiguous(), samples, out)
                return
            add = self._add_outputs[key] = launcher(rows, self.form.output_stretches, self._share)
        with fused.on_device(self.device):
            add(gradient, out)


class Caught:
    """One call of a layer; as the hook of its output, it counts when backward comes by."""

    __slots__ = ("__weakref__", "inputs", "outputs", "plan", "start", "tap", "x")

    def __init__(self, tap: Tap, plan: Plan, x: torch.Tensor | None) -> None:
        self.tap, self.plan, self.x = tap, plan, x
        self.inputs: torch.Tensor | None = None
        self.outputs: torch.Tensor | None = None
        self.start = 0

    def __call__(self, gradient: torch.Tensor) -> None:
        """In backward: adds up what has waited for it, and outputs if these are wanted; the step does the rest."""
        tap, form, one = self.tap, self.plan.form, self
        if self.x is not None:
            tap.catcher.add_up_together()
        if form.output_columns:
            if self.outputs is not None:
                one = Caught(tap, self.plan, None)
                one.inputs, one.start = self.inputs, self.start
            one.outputs = torch.empty(form.output_stretches * form.output_columns, device=self.plan.device)
            self.plan.add_outputs(gradient, tap.output_count(gradient), one.outputs)
        tap.caught.append(one)

    def add_up(self) -> None:
        """Adds up its input by itself."""
        if self.x is not None:
            self.inputs = torch.empty(self.plan.form.stretches * self.plan.form.columns, device=self.plan.device)
            with fused.on_device(self.plan.device):
                self.plan.add_inputs(self.x, self.inputs)
            if fused.is_capturing(self.plan.device):
                self.tap.catcher.keep(self.plan)
            self.x = None


def catch(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Catches a call of a layer; False where kernels do not apply."""
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
    caught = Caught(tap, plan, x)
    if plan.waits and not saves_tensors_otherwise():
        tap.catcher.wait(caught)
    else:
        caught.add_up()
    y.register_hook(caught)
    return True


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
    waits = x.dtype == y.dtype and not narrow
    if waits:
        stretches = rows.stretches(_BESIDE_OTHERS)
    else:
        stretches = (replace(rows, count=rows.places) if narrow else rows).stretches()
    form = Form(stretches, rows.columns, output_stretches, output_columns, count)
    return Plan(tap, x, rows, form, tap.share_of(y), waits=waits)


@dataclass
class _Table:
    """Programs of one launch, by what layers have caught."""

    programs: torch.Tensor
    parts: torch.Tensor
    sums: Addresses
    records: Addresses


class Catcher:
    """What the layers of one optimizer do together."""

    def __init__(self) -> None:
        self._waiting: list[ref[Caught]] = []
        self._most = _MOST_SHAPES
        self._together: dict[Any, Together] = {}
        self._tables: dict[Any, _Table] = {}
        self._in_graphs: dict[int, Any] = {}

    def keep(self, *used: Any) -> None:
        """Keeps what a CUDA graph that is being captured will read whenever it is replayed."""
        self._in_graphs |= {id(one): one for one in used}

    def wait(self, caught: Caught) -> None:
        """Has an input added up with others, unless its graph is thrown away."""
        self._waiting.append(ref(caught))
        if len(self._waiting) > self._most:
            self._waiting = [one for one in self._waiting if one() is not None]
            self._most = 2 * len(self._waiting) + _MOST_SHAPES

    def add_up_together(self) -> None:
        """Adds up all inputs that wait."""
        waiting, self._waiting = self._waiting, []
        by_device: dict[torch.device, list[Caught]] = {}
        for reference in waiting:
            one = reference()
            if one is not None and one.x is not None:
                by_device.setdefault(one.plan.device, []).append(one)
        for device, members in by_device.items():
            with fused.on_device(device):
                self._add_up(members, device)

    def _add_up(self, members: Sequence[Caught], device: torch.device) -> None:
        inputs = [one.x for one in members if one.x is not None]
        pairs = zip(members, inputs, strict=True)
        key = tuple((one.plan, is_aligned(one.plan.rows, x)) for one, x in pairs)
        together = self._together.get(key)
        if fused.is_capturing(device):
            self.keep(together, *(one.plan for one in members))
        if together is None:
            if fused.is_capturing(device):
                for one in members:
                    one.add_up()
                return
            shapes = [(plan.rows, plan.dtype, plan.form.stretches, aligned) for plan, aligned in key]
            together = _remember(self._together, key, Together(shapes, device))
        memory = torch.empty(together.size, device=device)
        together.add_up(inputs, memory)
        for one, start in zip(members, together.starts, strict=True):
            one.inputs, one.start, one.x = memory, start, None

    def settle(self, taps: Sequence[Tap]) -> None:
        """Adds what layers have caught to their records; mostly that is one launch."""
        if torch.compiler.is_compiling():
            return
        while ready := [tap for tap in taps if tap.caught and tap.record is not None]:
            by_device: dict[torch.device, list[Caught]] = {}
            for tap in ready:
                one = tap.caught.pop(0)
                by_device.setdefault(one.plan.device, []).append(one)
            for device, members in by_device.items():
                with fused.on_device(device):
                    self._add_to_records(members, device)

    def _add_to_records(self, members: Sequence[Caught], device: torch.device) -> None:
        capturing = fused.is_capturing(device)
        key = (device, tuple(one.plan.form for one in members))
        table = self._tables.get(key)
        if capturing:
            self.keep(table)
        if table is None:
            if capturing:
                for one in members:
                    _add_without_kernel(one)
                return
            table = _remember(self._tables, key, _new_table(key[1], device))
        kernels, flat = (import_module(f"gradweave.optim.{name}") for name in ("sum_kernels", "flat_kernels"))
        sums = [address for one in members for address in _addresses(one)]
        records = [one.tap.record.data_ptr() for one in members]  # type: ignore[union-attr]
        kernels.add_to_records[len(table.programs),](
            table.programs, table.parts, table.sums.holding(sums, flat, capturing=capturing, moves=True),
            table.records.holding(records, flat, capturing=capturing, moves=False), _AT_ONCE, _COLUMNS,
        )  # fmt: skip


def _remember(known: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(known) >= _MOST_SHAPES:
        known.clear()
    known[key] = value
    return value


def _addresses(one: Caught) -> tuple[int, int]:
    """Of the sums of inputs and of outputs."""
    inputs = 0 if one.inputs is None else one.inputs.data_ptr() + 4 * one.start
    return inputs, 0 if one.outputs is None else one.outputs.data_ptr()


def _new_table(forms: Sequence[Form], device: torch.device) -> _Table:
    parts: list[list[int]] = []
    programs: list[list[int]] = []
    for layer, form in enumerate(forms):
        inputs = [2 * layer, layer, form.stretches, form.columns, 0, form.count, form.columns, 0]
        outputs = [2 * layer + 1, layer, form.output_stretches, form.output_columns, form.columns + 1, 0, 0, 0]
        for part in (inputs, outputs):
            programs += [[len(parts), first] for first in range(0, part[3], _COLUMNS)]
            parts.append(part)
    there = [torch.tensor(rows, dtype=torch.int64).to(device) for rows in (programs, parts)]
    return _Table(there[0], there[1], Addresses(2 * len(forms), device), Addresses(len(forms), device))


def _add_without_kernel(one: Caught) -> None:
    """The same by torch's operations, for a graph that is captured before a step like it has run."""
    form, record = one.plan.form, one.tap.record
    if record is None or one.inputs is None:
        return
    inputs = one.inputs[one.start : one.start + form.stretches * form.columns]
    record[: form.columns].add_(inputs.view(form.stretches, form.columns).sum(0))
    record[form.columns].add_(form.count)
    if one.outputs is not None:
        record[form.columns + 1 :].add_(one.outputs.view(form.output_stretches, form.output_columns).sum(0))
