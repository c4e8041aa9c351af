"""Gradient nodes that all forwards of a model share, so that one backward sums gradients in stock order.

Autograd adds up the gradients of a weight in the order in which backward comes to its uses. Where autocast has cast the
weight once for several uses, it adds those up in low precision first. A node that all uses share knows that order.
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

from gradweave._compat.autograd import current_backward, keeps_graph
from gradweave._compat.functions import dispatch_modes, no_torch_function
from gradweave._compat.tensors import alias_of, stream_teller
from gradweave._runtime.split_calls.autocast_cache import AutocastNotes, is_cast_once
from gradweave._runtime.split_calls.gradient_node import add, in_precision
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.task import Gradients, Task

Weights = Mapping[int, tuple[torch.Tensor, torch.Tensor | None]]
"""Weights and biases by the number of their layer."""


class _SharedCopy:
    """A parameter in low precision, for all calls to which autocast would give the same copy.

    Attributes:
        low_precision: The copy; None once the node is closed.
        calls: Number of calls that use it.
    """

    def __init__(self, node: SharedNode, low_precision: torch.Tensor) -> None:
        self.low_precision: torch.Tensor | None = low_precision
        self.calls = 0
        self._node = node  # kept alive: its id is part of the key of this copy


class SharedNode:
    """A node of autograd for parameters that layers use together: mostly one weight and its bias.

    Args:
        layer: Number of the first of these layers.
        params: The parameters.
        queue: Computes the tasks.
        autocast_notes: Notes on copies that several calls share.
    """

    def __init__(
        self, layer: int, params: tuple[torch.Tensor, ...], queue: WeightGradientQueue, autocast_notes: AutocastNotes
    ) -> None:
        self.sink = _SharedSink(layer, params, queue)
        self._autocast_notes = autocast_notes
        self._params = params
        # Calls and the end of a backward may be on different threads.
        self._lock = threading.Lock()
        self._copies: WeakSet[_SharedCopy] = WeakSet()  # weakly: they keep this node alive
        self._forms = _forms(params)
        self._index = {id(p): index for index, p in enumerate(params)}
        self._stand_ins: tuple[torch.Tensor, ...] = _SharedNode.apply(self.sink, *params)  # type: ignore[no-untyped-call]
        self.sink.find_node = ref(self)

    def is_of(self, params: tuple[torch.Tensor, ...]) -> bool:
        """Return whether these are the parameters, in the memory and the form that they had, and the node is open."""
        same = (
            len(params) == len(self._params)
            and bool(self._stand_ins)
            and all(a is b for a, b in zip(params, self._params, strict=True))
        )
        return same and _forms(params) == self._forms

    def has(self, *params: torch.Tensor | None) -> bool:
        """Return whether all of these are among the parameters, in the memory and the form that they had."""
        indices = [self._index.get(id(p)) for p in params if p is not None]
        return all(index is not None and _form(self._params[index]) == self._forms[index] for index in indices)

    def call(self, weight: torch.Tensor, bias: torch.Tensor | None) -> NodeUse | None:
        """Return the use of a weight and a bias by one more call; None if a backward has closed the node."""
        with self._lock:
            if not self._stand_ins:
                return None
            return NodeUse(self, self._index[id(weight)], None if bias is None else self._index[id(bias)])

    def close(self) -> None:
        """Release the parameters' memory, unless the backward of a call is still to come.

        What is left of a graph may live up to the next one, by a loss that the loop prints. Parameters that something
        else refers to cannot be left pending by a fusion, and copies in low precision take as much memory as what the
        backward has freed.
        """
        with self._lock:
            if not self.sink.expects_backward:
                self._stand_ins = ()
                for copy in self._copies:
                    copy.low_precision = None
                self._copies.clear()

    def in_precision(self, index: int, dtype: torch.dtype) -> tuple[torch.Tensor, _SharedCopy | None]:
        """Return a parameter for one more call, and the copy that it shares with others, if there is one."""
        own = self._stand_ins[index]
        if own.dtype is dtype:
            return own, None
        if not is_cast_once(self._params[index]):
            return own.to(dtype), None
        notes = self._autocast_notes.of_context(own.device)
        key = id(self), index
        if key not in notes:
            notes[key] = _SharedCopy(self, own.to(dtype))
            self._copies.add(notes[key])
        copy: _SharedCopy = notes[key]
        copy.calls += 1
        return copy.low_precision, copy  # type: ignore[return-value]  # a node is open where a call is made

    def stand_in(self, param: torch.Tensor) -> torch.Tensor:
        """Return what stands for a parameter in a use whose gradient is computed where autograd comes to it."""
        use = self.call(param, None)
        if use is None:
            return param
        result: torch.Tensor = _OtherUse.apply(use, self._stand_ins[use.weight])  # type: ignore[no-untyped-call]
        return result


class NodeUse:
    """One call's use of a shared node, and the sink of that call: what backward leaves here goes with the graph.

    Attributes:
        weight: Index of the weight among the node's parameters.
        bias: Index of the bias, if there is one.
        gradients: What the call has left, by backward and in order: tasks, and gradients that were computed already.
    """

    def __init__(self, node: SharedNode, weight: int, bias: int | None) -> None:
        self.weight, self.bias = weight, bias
        self.gradients: dict[int, list[Task | torch.Tensor]] = {}
        self._node = node
        self._shared = node.sink
        self._shared.expect(self)
        self._copies: tuple[_SharedCopy | None, _SharedCopy | None] = (None, None)

    @property
    def sink(self) -> NodeUse:
        """This use itself."""
        return self

    @property
    def layer(self) -> int:
        """Number of the first layer that uses the node."""
        return self._shared.layer

    @property
    def may_outlive_backward(self) -> bool:
        """Whether the task may be finished after the end of its backward."""
        return self._shared.queue.deferral is not None

    def use(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias in a precision; called once."""
        weight, of_weight = self._node.in_precision(self.weight, dtype)
        bias, of_bias = (None, None) if self.bias is None else self._node.in_precision(self.bias, dtype)
        self._copies = of_weight, of_bias
        return weight, bias

    def shared_copies(self) -> tuple[_SharedCopy | None, _SharedCopy | None]:
        """Return the copies of weight and bias whose gradients are summed up before they are cast back."""
        of_weight, of_bias = self._copies
        return (
            of_weight if of_weight is not None and of_weight.calls > 1 else None,
            of_bias if of_bias is not None and of_bias.calls > 1 else None,
        )

    def add(self, task: Task) -> None:
        """Take the weight gradient of this call; called in backward."""
        dtypes = self._shared.dtypes
        of_weight, of_bias = self.shared_copies()
        own = (
            None if of_weight is not None else dtypes[self.weight],
            None if of_bias is not None or self.bias is None else dtypes[self.bias],
        )
        task.then(partial(in_precision, own))
        self._shared.note(self, task)
        self._shared.queue.add(task)

    def add_computed(self, gradient: torch.Tensor) -> None:
        """Take a gradient of the weight that was computed already."""
        self._shared.note(self, gradient)

    def differentiable(self, weight: torch.Tensor, *, of_call: bool) -> torch.Tensor:
        """Return the weight so that its gradients come to the node in the order in which backward makes them."""
        if self._copies != (None, None):
            return weight
        use = self if of_call else NodeUse(self._node, self.weight, None)
        result: torch.Tensor = _OtherUse.apply(use, weight)  # type: ignore[no-untyped-call]
        return result


class _Contribution(NamedTuple):
    use: NodeUse
    gradient: Task | torch.Tensor


class _SharedSink:
    """What calls have left for one node.

    The autograd function has only this, which leads to no tensor but leaves.

    Attributes:
        layer: Number of the first layer.
        dtypes: Types of the parameters.
        find_node: Returns the node while it exists.
        queue: Computes the tasks.
    """

    def __init__(self, layer: int, params: tuple[torch.Tensor, ...], queue: WeightGradientQueue) -> None:
        self.layer = layer
        self.queue = queue
        self.dtypes = tuple(p.dtype for p in params)
        self.find_node: Callable[[], SharedNode | None] = lambda: None
        self._params = params
        self._expected: WeakSet[NodeUse] = WeakSet()
        self._uses: dict[int, list[ref[NodeUse]]] = {}

    def expect(self, use: NodeUse) -> None:
        """Note a call whose backward is to come."""
        self._expected.add(use)

    @property
    def expects_backward(self) -> bool:
        """Whether a graph has calls that no backward has come to, or that a backward may come to again."""
        return len(self._expected) > 0

    def note(self, use: NodeUse, gradient: Task | torch.Tensor) -> None:
        """Note what a call has left in this backward; the use keeps it, and goes with its graph."""
        backward = current_backward()
        if not keeps_graph():
            self._expected.discard(use)
        use.gradients.setdefault(backward, []).append(gradient)
        if backward not in self._uses:
            # No callback tells of a backward that has failed: it is one whose graph is gone.
            for failed in [number for number, uses in list(self._uses.items()) if all(find() is None for find in uses)]:
                self._uses.pop(failed, None)
        self._uses.setdefault(backward, []).append(ref(use))

    def collect(self) -> list[torch.Tensor | None]:
        """Return the gradient of each parameter: the sum over all calls, as autograd would have added it up."""
        backward = current_backward()
        if not keeps_graph() and (node := self.find_node()) is not None:
            node.close()
        uses = [use for find in self._uses.pop(backward, ()) if (use := find()) is not None]
        contributions = [_Contribution(use, use.gradients[backward].pop(0)) for use in uses]
        for use in uses:
            use.gradients.pop(backward, None)
        if (stand_ins := self._defer(contributions)) is not None:
            return list(stand_ins[: len(self._params)])
        sums = _GradientSums(self.dtypes, [use for use, _ in contributions])
        for use, gradient in contributions:
            sums.add(use, self.queue.finish_and_take(gradient) if isinstance(gradient, Task) else (gradient, None))
        return sums.totals

    def _defer(self, contributions: list[_Contribution]) -> Gradients | None:
        """Return stand-ins if all calls have used one weight and its bias, in one precision."""
        if self.queue.deferral is None or not contributions or len(self._params) > 2:
            return None
        uses = [use for use, _ in contributions]
        tasks = [gradient for _, gradient in contributions if isinstance(gradient, Task)]
        if len(tasks) < len(uses) or any(
            use.weight != 0 or (use.bias is None) != (len(self._params) == 1) for use in uses
        ):
            return None
        if not _are_same(use.shared_copies() for use in uses):
            return None
        params = self._params
        return self.queue.deferral.defer(self.layer, params[0], params[1] if len(params) > 1 else None, tasks)


def _are_same(copies: Iterator[tuple[_SharedCopy | None, _SharedCopy | None]]) -> bool:
    """Return whether all calls share what they were given: nothing, or one copy of weight and bias each."""
    first, *others = copies
    return all(one[0] is first[0] and one[1] is first[1] for one in others)


class _GradientSums:
    """Sums of gradients, added up as autograd does: those of a shared copy are cast back once the last has come.

    Args:
        dtypes: Types of the parameters.
        uses: The uses whose gradients are to come, in their order; one several times if it has left several.

    Attributes:
        totals: The sum for each parameter.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...], uses: list[NodeUse]) -> None:
        self.totals: list[torch.Tensor | None] = [None] * len(dtypes)
        self._dtypes = dtypes
        self._missing_of_copy: dict[_SharedCopy, int] = {}
        self._sum_of_copy: dict[_SharedCopy, torch.Tensor | None] = {}
        self._missing_of_use = Counter(uses)
        self._sum_of_use: dict[NodeUse, torch.Tensor | None] = {}
        for use in uses:
            for copy in use.shared_copies():
                if copy is not None:
                    self._missing_of_copy[copy] = self._missing_of_copy.get(copy, 0) + 1

    def add(self, use: NodeUse, gradients: Gradients) -> None:
        """Add the next gradients of a use; they count once all of the use's have come."""
        self._missing_of_use[use] -= 1
        if self._missing_of_use[use] > 0 or use in self._sum_of_use:
            of_use, of_bias = add(self._sum_of_use.get(use), gradients[0]), gradients[1]
            if self._missing_of_use[use] > 0:
                self._sum_of_use[use] = of_use
                gradients = None, of_bias
            else:
                gradients = of_use, of_bias
        for index, copy, gradient in zip((use.weight, use.bias), use.shared_copies(), gradients, strict=True):
            if index is None or (gradient is None and copy is None):
                continue
            summand: torch.Tensor | None = gradient
            if copy is not None:
                self._missing_of_copy[copy] -= 1
                summand = self._sum_of_copy[copy] = add(self._sum_of_copy.get(copy), gradient)
                if self._missing_of_copy[copy] > 0:
                    continue
                del self._sum_of_copy[copy]
            summand, _ = in_precision((self._dtypes[index], None), (summand, None))
            self.totals[index] = add(self.totals[index], summand)


class _SharedNode(Function):
    @staticmethod
    def forward(ctx: Any, sink: _SharedSink, *params: torch.Tensor) -> Any:
        ctx.sink = sink
        ctx.set_materialize_grads(False)
        if (
            dispatch_modes()
        ):  # a mode that sees operations may not know the class of a parameter whose update is pending
            return tuple(p.detach() for p in params)
        return tuple(map(alias_of, params))  # resolves no pending update: that comes at the use of the weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        # What comes along the edges are gradients that did not become tasks, as those of differentiated backwards.
        sums = ctx.sink.collect()
        return None, *(add(one, other) for one, other in zip(sums, gradients, strict=True))


class _OtherUse(Function):
    """A use whose gradient is computed where autograd comes to it; the node only adds it up."""

    @staticmethod
    def forward(ctx: Any, use: NodeUse, weight: torch.Tensor) -> torch.Tensor:
        ctx.use = use
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            return None, gradient
        ctx.use.add_computed(gradient)
        return None, None


class SharedNodes:
    """The gradient nodes of a model's layers, for one forward and those that come while its graph exists.

    They are made again where a parameter was replaced, moved or frozen.

    Args:
        queue: Computes the tasks.

    Attributes:
        autocast_notes: Notes on copies that several calls share.
    """

    def __init__(self, queue: WeightGradientQueue) -> None:
        self.autocast_notes = AutocastNotes()
        self._queue = queue
        self._lock = threading.Lock()
        self._nodes: WeakValueDictionary[tuple[int, ...], SharedNode] = WeakValueDictionary()
        self._stream: int | None = None

    def of(self, weights: Weights) -> dict[int, SharedNode]:
        """Return the node of each weight and bias, by its ``id``, for a forward that is about to begin."""
        # Without torch functions: a pending update is applied where the weight is used, not here.
        with self._lock, no_torch_function():
            groups = _groups(weights)
            self._forget_other_stream(groups)
            nodes = {}
            for layer, params in groups:
                key = tuple(id(p) for p in params)
                node = self._nodes.get(key)
                if node is None or not node.is_of(params):
                    node = self._nodes[key] = SharedNode(layer, params, self._queue, self.autocast_notes)
                nodes.update(dict.fromkeys(key, node))
            return nodes

    def _forget_other_stream(self, groups: list[tuple[int, tuple[torch.Tensor, ...]]]) -> None:
        # Autograd runs a node on the stream on which it was made.
        if groups:
            stream = stream_teller(groups[0][1][0].device)()
            if stream != self._stream:
                self._stream = stream
                self._nodes.clear()


def _groups(weights: Weights) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
    """Return parameters that are used together in any layer, with the number of the first of their layers."""
    group_of: dict[int, list[Any]] = {}
    groups: list[list[Any]] = []
    for number, pair in weights.items():
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


def _forms(params: tuple[torch.Tensor, ...]) -> list[tuple[Any, ...]]:
    return [_form(p) for p in params]


def _form(p: torch.Tensor) -> tuple[Any, ...]:
    """Return what changes when a parameter is moved to other memory, converted or frozen."""
    return p.data_ptr(), p.dtype, p.shape, p.stride(), p.requires_grad
