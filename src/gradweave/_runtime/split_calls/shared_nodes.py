"""Taps of a model's own layers, shared by forwards that may have one backward: gradients are summed up in stock order.

Autograd adds up the gradients of a weight in the order in which backward comes to its uses; where autocast has cast
the weight once for several uses, it adds those up in low precision first. A tap that all uses share knows that order.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch.autograd import Function

from gradweave._compat.eager import (
    alias_of,
    current_backward,
    keeps_graph,
    no_torch_function,
    stream_teller,
    watchers,
)
from gradweave._runtime.split_calls.autocast_cache import Casts, is_cast_once
from gradweave._runtime.split_calls.gradient_node import add, in_precision
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.task import Gradients, Task

Layers = Mapping[int, tuple[torch.Tensor, torch.Tensor | None]]
"""Weights and biases by the number of their layer."""


class _Cast:
    """A parameter in low precision, for all calls that autocast would give the same copy.

    Attributes:
        low: The copy; None once the tap is closed.
        calls: That use it.
    """

    def __init__(self, tap: SharedTap, low: torch.Tensor) -> None:
        self.low: torch.Tensor | None = low
        self.calls = 0
        self._tap = tap  # whose number names this one


class SharedTap:
    """The parameters that some layers share, mostly a weight and its bias, as all calls are to use them.

    Args:
        layer: The number of the first of these layers.
        params: Weights and biases.
        queue: Where weight gradients are left.
        casts: What autocast keeps.
    """

    def __init__(self, layer: int, params: tuple[torch.Tensor, ...], queue: WeightGradientQueue, casts: Casts) -> None:
        self.pending = _SharedPending(layer, params, queue)
        self._casts = casts
        self._params = params
        self._lock = threading.Lock()
        self._made_casts: WeakSet[_Cast] = WeakSet()  # weakly: they keep this tap
        self._looks = _looks(params)
        self._index = {id(p): index for index, p in enumerate(params)}
        self._stands_for: tuple[torch.Tensor, ...] = _SharedTap.apply(self.pending, *params)  # type: ignore[no-untyped-call]
        self.pending.tap = ref(self)

    def is_of(self, params: tuple[torch.Tensor, ...]) -> bool:
        """Whether these are the parameters, in the memory and the form in which they were."""
        same = (
            len(params) == len(self._params)
            and bool(self._stands_for)
            and all(a is b for a, b in zip(params, self._params, strict=True))
        )
        return same and _looks(params) == self._looks

    def has(self, *params: torch.Tensor | None) -> bool:
        """Whether all of these are among the parameters, and none was put elsewhere since."""
        indices = [self._index.get(id(p)) for p in params if p is not None]
        return all(index is not None and _look(self._params[index]) == self._looks[index] for index in indices)

    def call(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Call | None:
        """For one more call of a weight and a bias; None if a backward has closed it."""
        with self._lock:
            if not self._stands_for:
                return None
            return Call(self, self._index[id(weight)], None if bias is None else self._index[id(bias)])

    def close(self) -> None:
        """Lets go of the parameters' memory, unless a call has its backward before it.

        What is left of a graph may be kept up to the next one, by a loss that the loop prints. Weights that something
        else refers to are not left pending, and low precision is as large as what the backward has freed.
        """
        with self._lock:
            if not self.pending.expects_backward:
                self._stands_for = ()
                for cast in self._made_casts:
                    cast.low = None
                self._made_casts.clear()

    def in_precision(self, index: int, dtype: torch.dtype) -> tuple[torch.Tensor, _Cast | None]:
        """A parameter for one more call, and what it shares with others that autocast gives the same copy."""
        known = self._stands_for[index]
        if known.dtype is dtype:
            return known, None
        if not is_cast_once(self._params[index]):
            return known.to(dtype), None
        kept = self._casts.kept(known.device)
        key = id(self), index
        if key not in kept:
            kept[key] = _Cast(self, known.to(dtype))
            self._made_casts.add(kept[key])
        cast: _Cast = kept[key]
        cast.calls += 1
        return cast.low, cast  # type: ignore[return-value]  # a tap is open where a call is made

    def whole(self, param: torch.Tensor) -> torch.Tensor:
        """A parameter for a use whose gradient is computed where autograd comes to it."""
        call = self.call(param, None)
        if call is None:
            return param
        result: torch.Tensor = _Whole.apply(call, self._stands_for[call.weight])  # type: ignore[no-untyped-call]
        return result


class Call:
    """One call's use of a tap; what it leaves in backward goes with the graph."""

    def __init__(self, tap: SharedTap, weight: int, bias: int | None) -> None:
        self.weight, self.bias = weight, bias
        self.tasks: dict[int, list[Task | torch.Tensor]] = {}
        self._tap = tap
        self._pending = tap.pending
        self._pending.expect(self)
        self._casts: tuple[_Cast | None, _Cast | None] = (None, None)

    @property
    def pending(self) -> Call:
        """Where the call leaves its task."""
        return self

    @property
    def layer(self) -> int:
        """The number of its layer."""
        return self._pending.layer

    @property
    def may_outlive(self) -> bool:
        """Whether the task may go on past the end of its backward."""
        return self._pending.queue.late is not None

    def used_as(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias in a precision, to be asked for once."""
        weight, of_weight = self._tap.in_precision(self.weight, dtype)
        bias, of_bias = (None, None) if self.bias is None else self._tap.in_precision(self.bias, dtype)
        self._casts = of_weight, of_bias
        return weight, bias

    def casts(self) -> tuple[_Cast | None, _Cast | None]:
        """Copies of weight and bias whose gradients are summed up before they are cast back."""
        of_weight, of_bias = self._casts
        return (
            of_weight if of_weight is not None and of_weight.calls > 1 else None,
            of_bias if of_bias is not None and of_bias.calls > 1 else None,
        )

    def leave(self, task: Task) -> None:
        """Leaves the weight gradient of this call; called in backward."""
        dtypes = self._pending.dtypes
        of_weight, of_bias = self.casts()
        own = (
            None if of_weight is not None else dtypes[self.weight],
            None if of_bias is not None or self.bias is None else dtypes[self.bias],
        )
        task.then(partial(in_precision, own))
        self._pending.note(self, task)
        self._pending.queue.add(task)

    def leave_whole(self, gradient: torch.Tensor) -> None:
        """Leaves a gradient of the weight that was computed already."""
        self._pending.note(self, gradient)

    def in_derivatives(self, weight: torch.Tensor, *, of_call: bool) -> torch.Tensor:
        """The weight as this call has used it, for a backward that has one of its own.

        Args:
            weight: What the call has used.
            of_call: Whether gradients that come of it are added to the call's own first, as they are where torch has
                transposed the weight for the call.
        """
        if self._casts != (None, None):
            return weight
        call = self if of_call else Call(self._tap, self.weight, None)
        result: torch.Tensor = _Whole.apply(call, weight)  # type: ignore[no-untyped-call]
        return result


class _Arrived(NamedTuple):
    call: Call
    left: Task | torch.Tensor


class _SharedPending:
    """What calls have left for one tap: the tap's node of autograd has only this, which leads to no tensor but leaves.

    Attributes:
        layer: The number of the first layer.
        dtypes: Of the parameters.
        tap: The tap, while it is there.
        queue: Where tasks are left.
    """

    def __init__(self, layer: int, params: tuple[torch.Tensor, ...], queue: WeightGradientQueue) -> None:
        self.layer = layer
        self.queue = queue
        self.dtypes = tuple(p.dtype for p in params)
        self.tap: Callable[[], SharedTap | None] = lambda: None
        self._params = params
        self._expected: WeakSet[Call] = WeakSet()
        self._calls: dict[int, list[ref[Call]]] = {}

    def expect(self, call: Call) -> None:
        """A call has been made whose backward is to come."""
        self._expected.add(call)

    @property
    def expects_backward(self) -> bool:
        """Whether a graph that is there has calls that no backward has come to, or may come to again."""
        return len(self._expected) > 0

    def note(self, call: Call, left: Task | torch.Tensor) -> None:
        """Notes what a call has left in this backward; the call keeps it, and goes with its graph."""
        backward = current_backward()
        if not keeps_graph():
            self._expected.discard(call)
        call.tasks.setdefault(backward, []).append(left)
        if backward not in self._calls:
            for failed in [
                number for number, calls in list(self._calls.items()) if all(one() is None for one in calls)
            ]:
                self._calls.pop(failed, None)
        self._calls.setdefault(backward, []).append(ref(call))

    def collect(self) -> list[torch.Tensor | None]:
        """The gradient of each parameter: the sum over all calls, as autograd would have added it up."""
        backward = current_backward()
        if not keeps_graph() and (tap := self.tap()) is not None:
            tap.close()
        calls = [call for known in self._calls.pop(backward, ()) if (call := known()) is not None]
        arrived = [_Arrived(call, call.tasks[backward].pop(0)) for call in calls]
        for call in calls:
            call.tasks.pop(backward, None)
        if (late := self._late(arrived)) is not None:
            return list(late[: len(self._params)])
        sums = _Sums(self.dtypes, [call for call, _ in arrived])
        for call, left in arrived:
            sums.add(call, self.queue.finish_and_take(left) if isinstance(left, Task) else (left, None))
        return sums.totals

    def _late(self, arrived: list[_Arrived]) -> Gradients | None:
        """Stand-ins, where a weight and its bias alone are tapped, and all calls have used them in one precision."""
        if self.queue.late is None or not arrived or len(self._params) > 2:
            return None
        calls = [call for call, _ in arrived]
        tasks = [left for _, left in arrived if isinstance(left, Task)]
        if len(tasks) < len(calls) or any(
            call.weight != 0 or (call.bias is None) != (len(self._params) == 1) for call in calls
        ):
            return None
        if not _is_same(call.casts() for call in calls):
            return None
        params = self._params
        return self.queue.late.take(self.layer, params[0], params[1] if len(params) > 1 else None, tasks)


def _is_same(casts: Iterator[tuple[_Cast | None, _Cast | None]]) -> bool:
    """Whether all calls share what they were given: nothing, or one copy of weight and bias each."""
    first, *others = casts
    return all(one[0] is first[0] and one[1] is first[1] for one in others)


class _Sums:
    """Adds gradients up as autograd does: a copy's own when the last of them has come, cast back."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], calls: list[Call]) -> None:
        self.totals: list[torch.Tensor | None] = [None] * len(dtypes)
        self._dtypes = dtypes
        self._left: dict[_Cast, int] = {}
        self._low: dict[_Cast, torch.Tensor | None] = {}
        self._left_of_call = Counter(calls)
        self._of_call: dict[Call, torch.Tensor | None] = {}
        for call in calls:
            for cast in call.casts():
                if cast is not None:
                    self._left[cast] = self._left.get(cast, 0) + 1

    def add(self, call: Call, gradients: Gradients) -> None:
        """Adds what the next call gives, once all of it has come."""
        self._left_of_call[call] -= 1
        if self._left_of_call[call] > 0 or call in self._of_call:
            of_call, of_bias = add(self._of_call.get(call), gradients[0]), gradients[1]
            if self._left_of_call[call] > 0:
                self._of_call[call] = of_call
                gradients = None, of_bias
            else:
                gradients = of_call, of_bias
        for index, cast, gradient in zip((call.weight, call.bias), call.casts(), gradients, strict=True):
            if index is None or (gradient is None and cast is None):
                continue
            made: torch.Tensor | None = gradient
            if cast is not None:
                self._left[cast] -= 1
                made = self._low[cast] = add(self._low.get(cast), gradient)
                if self._left[cast] > 0:
                    continue
                del self._low[cast]
            made, _ = in_precision((self._dtypes[index], None), (made, None))
            self.totals[index] = add(self.totals[index], made)


class _SharedTap(Function):
    """The node of autograd behind a tap."""

    @staticmethod
    def forward(ctx: Any, pending: _SharedPending, *params: torch.Tensor) -> Any:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        if watchers():  # a mode that sees operations may not know the class of a parameter that is pending
            return tuple(p.detach() for p in params)
        return tuple(map(alias_of, params))  # of one that is pending too: its update comes at its use

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        made = ctx.pending.collect()
        return None, *(add(one, other) for one, other in zip(made, gradients, strict=True))


class _Whole(Function):
    """A use whose gradient is computed where autograd comes to it, and only added up by the tap."""

    @staticmethod
    def forward(ctx: Any, call: Call, weight: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            return None, gradient
        ctx.call.leave_whole(gradient)
        return None, None


class SharedTaps:
    """The taps of a model's layers: of one forward, and of those that come while its graph is there.

    They are made again where a parameter was replaced, moved or frozen.

    Args:
        queue: Where weight gradients are left.
    """

    def __init__(self, queue: WeightGradientQueue) -> None:
        self.casts = Casts()
        self._queue = queue
        self._lock = threading.Lock()
        self._taps: WeakValueDictionary[tuple[int, ...], SharedTap] = WeakValueDictionary()
        self._stream: int | None = None

    def of(self, layers: Layers) -> dict[int, SharedTap]:
        """The tap of each weight and bias of some layers, by ``id``; for a forward that is about to begin."""
        with self._lock, no_torch_function():  # an update that is pending is applied where the weight is used, not here
            groups = _groups(layers)
            self._forget_another_stream(groups)
            taps = {}
            for layer, params in groups:
                key = tuple(id(p) for p in params)
                known = self._taps.get(key)
                if known is None or not known.is_of(params):
                    known = self._taps[key] = self._made(layer, params)
                taps.update(dict.fromkeys(key, known))
            return taps

    def _made(self, layer: int, params: tuple[torch.Tensor, ...]) -> SharedTap:
        return SharedTap(layer, params, self._queue, self.casts)

    def _forget_another_stream(self, groups: list[tuple[int, tuple[torch.Tensor, ...]]]) -> None:
        """Autograd runs a node on the stream on which it was made."""
        if groups:
            stream = stream_teller(groups[0][1][0].device)()
            if stream != self._stream:
                self._stream = stream
                self._taps.clear()


def _groups(layers: Layers) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
    """Parameters that are used together, in any layer, with the number of the first of these."""
    group_of: dict[int, list[Any]] = {}
    groups: list[list[Any]] = []
    for number, pair in layers.items():
        params = [p for p in pair if p is not None]
        known = [group_of[id(p)] for p in params if id(p) in group_of]
        group = known[0] if known else [number]
        if not known:
            groups.append(group)
        for other in known[1:]:
            if other is not group:
                group += other[1:]
                groups = [one for one in groups if one is not other]
        group += [p for p in params if all(p is not q for q in group[1:])]
        for p in group[1:]:
            group_of[id(p)] = group
    return [(group[0], tuple(group[1:])) for group in groups]


def _looks(params: tuple[torch.Tensor, ...]) -> list[tuple[Any, ...]]:
    return [_look(p) for p in params]


def _look(p: torch.Tensor) -> tuple[Any, ...]:
    """What changes when a parameter is put elsewhere, or frozen."""
    return p.data_ptr(), p.dtype, p.shape, p.stride(), p.requires_grad
