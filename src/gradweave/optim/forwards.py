"""One forward of a model, of which the inputs of all layers are added up together, and nothing is left in its graph.

The first forward of a kind has an autograd function behind each layer (:mod:`gradweave.optim.caught`), and is learnt:
which layers it calls, one after the other, and with what. Forwards that go the same way leave no more than a list of
inputs, and one hook on what the model returns. When backward comes by there, the inputs that autograd keeps anyway are
added up and counted for all layers, in a few launches. Inputs that autograd does not keep are added up as the forward
goes on, some of them together; for that they are held, within a bound of bytes.

A forward that goes another way than the one it began like is counted as far as the two agree, layer by layer, and its
other layers get functions of their own again. So does everything, for good, where weights get gradients although
backward was never seen to pass what the model returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from gradweave.announce import announce
from gradweave.compat.eager import (
    current_backward,
    flat_leaves,
    in_function_transform,
    is_watched,
    raw_stream,
    saved_tensors_are_hooked,
)
from gradweave.optim import fused
from gradweave.optim.sum_tables import AT_ONCE, COLUMNS, Together, is_aligned, record_tables

if TYPE_CHECKING:
    from gradweave.optim.capture import Tap
    from gradweave.optim.caught import Plan

_HELD_BYTES = 64 << 20
"""Of inputs that autograd does not keep."""
_MOST_KINDS = 16
"""How many kinds of forwards are remembered."""
KEPT, HELD, ALONE = "kept", "held", "alone"
"""What becomes of an input: autograd keeps it; it is held for others to join; it is added up at once."""


@dataclass(frozen=True, slots=True)
class Call:
    """A layer's call, as it was and is expected again.

    Attributes:
        tap: The layer's.
        plan: How its input is added up.
        shape: Of the input.
        strides: Of the input.
        dtype: Of the input.
        made: Shape of the output.
        made_dtype: Of the output.
        aligned: Whether several channels of the input can be read at once.
        role: What becomes of the input.
    """

    tap: Tap
    plan: Plan
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    made: torch.Size
    made_dtype: torch.dtype
    aligned: bool
    role: str

    @classmethod
    def of(cls, tap: Tap, plan: Plan, x: torch.Tensor, y: torch.Tensor, role: str) -> Call:
        """What was called with what."""
        return cls(tap, plan, x.shape, x.stride(), x.dtype, y.shape, y.dtype, is_aligned(plan.rows, x), role)

    def is_like(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether another call of the layer is the same, as far as its sums are concerned."""
        return (
            x.shape == self.shape
            and x.stride() == self.strides
            and x.dtype is self.dtype
            and y.shape == self.made
            and y.dtype is self.made_dtype
            and not (self.aligned and x.data_ptr() % 16)
        )


class Route:
    """The calls of a kind of forward, and the tables by which their inputs are added up.

    Args:
        calls: One after the other, all on one device.

    Attributes:
        calls: The same.
        taps: Their layers'.
        last_held: By the place of the last call of inputs that are added up together: which of them, and where.
        starts: Where the sums of each call begin.
        size: Of the memory for all sums.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.device = calls[0].plan.device
        self.taps = {id(call.tap) for call in calls}
        self.starts = [0] * len(calls)
        self.size = 0
        self.last_held: dict[int, tuple[Together, int]] = {}
        places = [place for place, call in enumerate(calls) if call.role == KEPT]
        self._kept = self._together(places) if places else None
        held: list[int] = []
        taken = 0
        for place, call in enumerate(calls):
            if call.role == ALONE:
                self.starts[place] = self._room(call.plan.form.stretches * call.plan.form.columns)
            elif call.role == HELD:
                held.append(place)
                taken += call.shape.numel() * call.dtype.itemsize
                if taken >= _HELD_BYTES:
                    self.last_held[place], held, taken = self._together(held), [], 0
        if held:
            self.last_held[held[-1]] = self._together(held)
        self._tables = [self._record_tables(places) for places in _each_once(calls)]
        self._records = [call.tap.record for call in calls]

    def _room(self, size: int) -> int:
        start = self.size
        self.size += -(-size // 4) * 4
        return start

    def _together(self, places: Sequence[int]) -> tuple[Together, int]:
        calls = [self.calls[place] for place in places]
        members = [(call.plan.rows, call.dtype, call.plan.form.stretches, call.aligned) for call in calls]
        together = Together(members, self.device)
        start = self._room(together.size)
        for place, own in zip(places, together.starts, strict=True):
            self.starts[place] = start + own
        return together, start

    def _record_tables(self, places: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        calls = [self.calls[place] for place in places]
        records = [record for call in calls if (record := call.tap.record) is not None]
        starts = [self.starts[place] for place in places]
        return record_tables([call.plan.form for call in calls], records, starts, self.device)

    def add_up_kept(self, inputs: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        """Writes the sums of the inputs that autograd keeps."""
        if self._kept is not None:
            together, start = self._kept
            together.add_up(inputs, memory[start:])

    def add_to_records(self, memory: torch.Tensor) -> None:
        """Adds the sums of all calls to their layers' records."""
        kernels = import_module("gradweave.optim.sum_kernels")
        for programs, parts in self._tables:
            kernels.add_to_records_by_place[len(programs),](programs, parts, memory, AT_ONCE, COLUMNS)


def _each_once(calls: Sequence[Call]) -> list[list[int]]:
    """Places of calls, so that none of a list is of the same layer as another: programs of a launch run at once."""
    lists: list[list[int]] = []
    seen: dict[int, int] = {}
    for place, call in enumerate(calls):
        number = seen.get(id(call.tap), 0)
        seen[id(call.tap)] = number + 1
        if number == len(lists):
            lists.append([])
        lists[number].append(place)
    return lists


class Forward:
    """What is noted of one forward.

    Args:
        forwards: Of the model.
    """

    def __init__(self, forwards: Forwards) -> None:
        self._forwards = forwards
        self._thread = get_ident()
        self._stream = 0
        self._route: Route | None = None
        self._key: Any = None
        self._learnt: list[Call] | None = None
        self._place = 0
        self._kept: list[torch.Tensor] = []
        self._held: list[tuple[torch.Tensor, int]] = []
        self._memory: torch.Tensor | None = None
        self._apart: list[tuple[Call, torch.Tensor]] = []
        self._has_left = False
        self._counted_in: int | None = None

    def takes(self, tap: Tap, x: Any, y: Any) -> bool:
        """Whether a layer's call is what was expected, and is taken care of."""
        route = self._route
        if route is None:
            if self._learnt is not None or not self._sets_out(tap, x, y):
                return False
            route = self._route
        if self._has_left or route is None or id(tap) not in route.taps or get_ident() != self._thread:
            return False
        place = self._place
        call = route.calls[place] if place < len(route.calls) else None
        expected = call is not None and call.tap is tap and call.is_like(x, y) and self._is_here(call.plan)
        if call is None or not expected or not _is_ordinary(tap, x, y):
            self._leave()
            return False
        if call.role == KEPT:
            self._kept.append(x)
        else:
            self._add_up(route, call, place, x)
        self._place = place + 1
        return True

    def learns(self, tap: Tap, plan: Plan, x: torch.Tensor, y: torch.Tensor) -> None:
        """Notes a call that has got a function of its own, if a forward of this kind is seen for the first time."""
        if self._learnt is None or plan.form.output_columns or get_ident() != self._thread or not self._is_here(plan):
            return
        role = KEPT if plan.waits else ALONE if plan.is_narrow else HELD
        self._learnt.append(Call.of(tap, plan, x, y, role))

    def ends(self, output: Any) -> None:
        """Has backward count when it comes by what the model returns."""
        leaves = [leaf for leaf in flat_leaves(output) if isinstance(leaf, torch.Tensor)]
        found = {node for leaf in leaves if (node := leaf.grad_fn) is not None}
        if self._learnt is not None:
            if self._learnt and found and not fused.is_capturing(self._learnt[0].plan.device):
                self._forwards.remember(self._key, self._learnt)
            return
        if self._route is not None and not self._has_left and self._place < len(self._route.calls):
            self._leave()
        if not found or not self._place:
            return
        self._forwards.taken += 1
        for node in found:
            node.register_prehook(self._count)

    def _sets_out(self, tap: Tap, x: Any, y: Any) -> bool:
        """Finds out with the first call which kind of forward this is."""
        if not isinstance(x, torch.Tensor) or tap.with_outputs or not _is_ordinary(tap, x, y):
            return False
        self._stream = raw_stream(x.device)
        self._key = (id(tap), x.shape, x.stride(), x.dtype, y.dtype, x.device)
        self._route = self._forwards.known(self._key)
        if self._route is None:
            self._learnt = []
            return False
        self._memory = torch.empty(self._route.size, dtype=torch.float32, device=x.device)
        return True

    def _is_here(self, plan: Plan) -> bool:
        """Whether the stream is that of the first call."""
        return raw_stream(plan.device) == self._stream

    def _add_up(self, route: Route, call: Call, place: int, x: torch.Tensor) -> None:
        """Adds up an input that autograd does not keep, maybe later with others."""
        memory = self._sums_of(route)
        with torch.no_grad(), fused.on_device(route.device):
            if call.role == ALONE:
                call.plan.add_inputs(x.detach(), memory[route.starts[place] :])
                return
            self._held.append((x, x._version))
            last = route.last_held.get(place)
            if last is not None:
                if any(one._version != version for one, version in self._held):
                    self._leave()  # what was held is no longer what the layers were applied to
                    return
                inputs, self._held = [one.detach() for one, _ in self._held], []
                last[0].add_up(inputs, memory[last[1] :])

    def _sums_of(self, route: Route) -> torch.Tensor:
        if self._memory is None:
            self._memory = torch.empty(route.size, dtype=torch.float32, device=route.device)
        return self._memory

    def _leave(self) -> None:
        """Goes its own way from here: what was taken so far is added up layer by layer."""
        route, self._has_left = self._route, True
        if route is None:
            return
        self._forwards.forget(self._key)
        kept, held = iter(self._kept), dict(zip(self._places_held(route), self._held, strict=False))
        with torch.no_grad(), fused.on_device(route.device):
            for place, call in enumerate(route.calls[: self._place]):
                if call.role == KEPT:
                    self._apart.append((call, call.plan.inputs(next(kept).detach())))
                elif place in held:
                    x, version = held[place]
                    if x._version == version:
                        self._apart.append((call, call.plan.inputs(x.detach())))
                else:
                    size, start = call.plan.form.stretches * call.plan.form.columns, route.starts[place]
                    self._apart.append((call, self._sums_of(route)[start : start + size]))
        self._kept, self._held = [], []

    def _places_held(self, route: Route) -> list[int]:
        """Where the inputs that are held now came from: behind the last ones that were added up together."""
        behind = max((place for place in route.last_held if place < self._place), default=-1)
        places = range(behind + 1, len(route.calls))
        return [place for place in places if route.calls[place].role == HELD]

    def _count(self, *_: Any) -> None:
        """Counts for all layers; once for each backward."""
        route, backward = self._route, current_backward()
        if route is None or backward == self._counted_in:
            return
        self._counted_in = backward
        self._forwards.counted += 1
        with torch.no_grad(), fused.on_device(route.device):
            for call, sums in self._apart:
                call.tap.catcher.add_alone(call.tap, call.plan.form, sums)
            if self._has_left:
                return
            if fused.is_capturing(route.device):
                self._forwards.keep(route)
            memory = self._sums_of(route)
            kept, self._kept = self._kept, []
            if kept:
                route.add_up_kept([x.detach() for x in kept], memory)
            route.add_to_records(memory)


def _is_ordinary(tap: Tap, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether nothing is special about how a layer is called."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and tap.record is not None
        and tap.masking.mask is None
        and y.requires_grad
        and torch.is_grad_enabled()
        and not saved_tensors_are_hooked()
    )


class Forwards:
    """The forwards of one model: the one that is going on, and the kinds that are known.

    Attributes:
        going: The one that is going on; None outside of the model.
        taken: How many were left to a hook since the last step.
        counted: How many such hooks have seen a backward since.
    """

    def __init__(self, keep: Callable[..., None]) -> None:
        self.keep = keep
        self.going: Forward | None = None
        self.taken = self.counted = 0
        self._routes: dict[Any, Route] = {}
        self._depth = 0
        self._is_off = False

    def begin(self, *_: Any) -> None:
        """Before the model's forward."""
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1 or self.going is None:
            usual = not self._is_off and torch.is_grad_enabled() and not is_watched() and not in_function_transform()
            self.going = Forward(self) if usual else None

    def end(self, _: Any, __: Any, output: Any) -> None:
        """Behind it, or when it has failed."""
        if torch.compiler.is_compiling():
            return
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0:
            going, self.going = self.going, None
            if going is not None:
                going.ends(output)

    def known(self, key: Any) -> Route | None:
        """The way that forwards which begin so have gone."""
        return self._routes.get(key)

    def remember(self, key: Any, calls: Sequence[Call]) -> None:
        """Notes the way of a forward."""
        if len({call.plan.device for call in calls}) > 1:
            return
        if len(self._routes) >= _MOST_KINDS:
            self._routes.clear()
        self._routes[key] = Route(calls)

    def forget(self, key: Any = None) -> None:
        """Forgets one way, or all of them, when records are others."""
        if key is None:
            self._routes.clear()
        else:
            self._routes.pop(key, None)

    def look_back(self) -> None:
        """At a step: turns to functions behind each layer if no hook has seen the backward."""
        if self.taken and not self.counted and not self._is_off:
            self._is_off = True
            announce(
                "optim: gradients come from elsewhere than what the model returns; each layer is watched by itself"
            )
        self.taken = self.counted = 0
