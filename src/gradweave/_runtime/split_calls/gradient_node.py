"""Nodes of autograd at which the weight gradients of calls come together.

A gradient node stands between a weight and the calls that use it. In backward each call adds a task to the node's sink
instead of returning a gradient. Autograd runs the node after all of these calls, and the node returns the sum of their
gradients, as autograd would: hooks on the weight, accumulation, tied weights and DDP see what they always see.

Of the nodes that are ready, autograd runs the one that was made last. So a node that is made at the first use of its
weight runs in stock order, and one that was made before the forward runs after the whole chain of input gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.autograd import Function

from gradweave._compat.autograd import current_backward
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.task import Gradients, Task
from gradweave._runtime.split_calls.weights import WeightCopies

Precisions = tuple[torch.dtype | None, torch.dtype | None]
"""Types to which the gradients of a weight and of its bias are cast; None for none."""


class GradientNode:
    """A node of autograd for one weight and its bias, in one forward.

    Args:
        layer: Number of the layer.
        weight: The weight.
        bias: Its bias, if there is one.
        queue: Computes the tasks.

    Attributes:
        sink: The destination of the calls' tasks.
    """

    def __init__(self, layer: int, weight: torch.Tensor, bias: torch.Tensor | None, queue: WeightGradientQueue) -> None:
        self.sink = NodeSink(layer, queue, weight, bias)
        stand_ins = _GradientNode.apply(self.sink, weight, bias)  # type: ignore[no-untyped-call]
        self._copies = WeightCopies(*stand_ins, is_leaf=weight.is_leaf)

    def stands_for(self, weight: torch.Tensor) -> bool:
        """Return whether a weight is still in the memory that it had when the node was made."""
        return self._copies.stands_for(weight)

    def use(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias in a precision, for one more call."""
        self.sink.calls += 1
        return self._copies.in_precision(dtype)


class NodeSink:
    """The tasks that calls have left for one node.

    The autograd function has only this, not the :class:`GradientNode`, whose tensors have the function: garbage
    collection does not see through such a cycle.

    Attributes:
        layer: Number of the layer; nodes of one weight with different biases have the same.
        calls: Number of calls in the forward that use the node.
        dtypes: Types of the weight and of its bias.
    """

    def __init__(self, layer: int, queue: WeightGradientQueue, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.layer = layer
        self.calls = 0
        self.dtypes: Precisions = weight.dtype, None if bias is None else bias.dtype
        self._find_weight = _reference(weight)
        self._find_bias = None if bias is None else _reference(bias)
        self._queue = queue
        self._tasks: dict[int, list[Task]] = {}

    @property
    def may_outlive_backward(self) -> bool:
        """Whether tasks may be finished after the end of their backward."""
        return self._queue.deferral is not None

    def differentiable(self, weight: torch.Tensor, *, of_call: bool) -> torch.Tensor:  # noqa: ARG002
        """Return the weight as it is."""
        return weight

    def add(self, task: Task) -> None:
        """Take the weight gradient of a call; called in backward."""
        if self.calls == 1:
            # The only call: cast to the weight's type on the stream of the task, not on that of the backward. Several
            # are summed up in low precision first, as autograd does it. No method: the task would keep itself alive.
            task.then(partial(in_precision, self.dtypes))
        self._tasks.setdefault(current_backward(), []).append(task)
        self._queue.add(task)

    def collect(self) -> Gradients:
        """Return the sums over all calls, in the order in which this backward came to them."""
        # Another backward over the same graph may have left tasks that it did not ask for: they are not of this sum.
        tasks = self._tasks.pop(current_backward(), [])
        if self._queue.deferral is not None:
            weight, bias = self._find_weight(), self._find_bias() if self._find_bias is not None else None
            if weight is not None:
                stand_ins = self._queue.deferral.defer(self.layer, weight, bias, tasks)
                if stand_ins is not None:
                    return stand_ins
        return sum_of(self._queue.finish_and_take(task) for task in tasks)


def _reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    # Weak where the tensor has a graph that leads back to the node. Not of a leaf: torch swaps no tensor that has weak
    # references (torch.utils.swap_tensors), as Module.to() may do with parameters.
    return partial(_itself, tensor) if tensor.is_leaf else ref(tensor)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def in_precision(dtypes: Precisions, gradients: Gradients) -> Gradients:
    """Return gradients in the types of the weight and of its bias."""
    of_weight, of_bias = (
        gradient if gradient is None or dtype is None or gradient.dtype is dtype else gradient.to(dtype)
        for gradient, dtype in zip(gradients, dtypes, strict=True)
    )
    return of_weight, of_bias


def sum_of(results: Iterable[Gradients]) -> Gradients:
    """Return the sum of the gradients of several calls, added up in their order."""
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    for of_weight, of_bias in results:
        weight, bias = add(weight, of_weight), add(bias, of_bias)
    return weight, bias


def add(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients, of which either may be missing."""
    return other if one is None else one if other is None else one + other


class _GradientNode(Function):
    @staticmethod
    def forward(ctx: Any, sink: NodeSink, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        ctx.sink = sink
        ctx.set_materialize_grads(False)
        return weight.detach(), None if bias is None else bias.detach()

    @staticmethod
    def backward(ctx: Any, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Any:
        # What comes along the edges are gradients that did not become tasks, as those of differentiated backwards.
        of_weight, of_bias = in_precision(ctx.sink.dtypes, ctx.sink.collect())
        return None, add(of_weight, weight), add(of_bias, bias)
