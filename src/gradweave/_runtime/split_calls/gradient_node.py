"""Where a weight enters its layers: the place in backward at which its gradient comes out.

A tap stands between a weight and the calls that use it. Each call leaves a task in the tap instead of
a gradient. Autograd runs the tap once all of these calls are through, and the tap hands the sum of their
gradients on, as autograd would: hooks on the weight, accumulation, tied weights and DDP see what they
always see. Of the nodes that are ready, autograd runs the one made last. So a tap that is made right at
its first use runs in stock order, and one that was made before the forward began runs when the chain of
input gradients has come to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.autograd import Function

from gradweave._compat.eager import current_backward
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.taps import WeightCopies
from gradweave._runtime.split_calls.task import Gradients, Task

Precisions = tuple[torch.dtype | None, torch.dtype | None]
"""Of a weight and of its bias; None for what stays as it is."""


class Tap:
    """A weight and its bias as layers are to use them, in one forward.

    Attributes:
        pending: Where calls leave their tasks.
    """

    def __init__(self, layer: int, weight: torch.Tensor, bias: torch.Tensor | None, queue: WeightGradientQueue) -> None:
        self.pending = Pending(layer, queue, weight, bias)
        stand_ins = _Tap.apply(self.pending, weight, bias)  # type: ignore[no-untyped-call]
        self._copies = WeightCopies(*stand_ins, is_leaf=weight.is_leaf)

    def stands_for(self, weight: torch.Tensor) -> bool:
        """Return whether the weight is still the tensor that it was, and no other one took its place."""
        return self._copies.stands_for(weight)

    def used_as(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias in a precision, for one more call."""
        self.pending.calls += 1
        return self._copies.used_as(dtype)


class Pending:
    """The tasks that calls have left for one tap.

    The tap's node of autograd has only this, not the tap, whose tensors have the node.

    Attributes:
        layer: The number of the layer; taps of one weight with different biases have the same.
        calls: Of the forward, which use the tap.
        dtypes: Of the weight and of its bias.
    """

    def __init__(self, layer: int, queue: WeightGradientQueue, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.layer = layer
        self.calls = 0
        self.dtypes: Precisions = weight.dtype, None if bias is None else bias.dtype
        self._weight = _reference(weight)
        self._bias = None if bias is None else _reference(bias)
        self._queue = queue
        self._tasks: dict[int, list[Task]] = {}

    @property
    def may_outlive(self) -> bool:
        """Whether tasks may go on past the end of their backward."""
        return self._queue.late is not None

    def in_derivatives(self, weight: torch.Tensor, *, of_call: bool) -> torch.Tensor:  # noqa: ARG002
        """The weight for a backward that has one of its own: as it is."""
        return weight

    def leave(self, task: Task) -> None:
        """Leaves the weight gradient of a call; called in backward.

        That of the only call is cast where it is computed; several are summed up before, as autograd does it.
        """
        if self.calls == 1:
            task.then(partial(in_precision, self.dtypes))  # not a method: the task would keep itself alive
        self._tasks.setdefault(current_backward(), []).append(task)
        self._queue.add(task)

    def collect(self) -> Gradients:
        """The sums over all calls, in the order in which this backward came to them.

        Another one over the same graph may have left tasks that it did not ask for.
        """
        tasks = self._tasks.pop(current_backward(), [])
        if self._queue.late is not None:
            weight, bias = self._weight(), self._bias() if self._bias is not None else None
            if weight is not None and (late := self._queue.late.take(self.layer, weight, bias, tasks)) is not None:
                return late
        return sum_of(self._queue.finish_and_take(task) for task in tasks)


def _reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """A reference to a tensor: weak where autograd leads from it to here; not of a leaf, which could not be swapped."""
    return partial(_itself, tensor) if tensor.is_leaf else ref(tensor)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def in_precision(dtypes: Precisions, gradients: Gradients) -> Gradients:
    """Gradients in the precision of the weight and of its bias."""
    of_weight, of_bias = (
        gradient if gradient is None or dtype is None or gradient.dtype is dtype else gradient.to(dtype)
        for gradient, dtype in zip(gradients, dtypes, strict=True)
    )
    return of_weight, of_bias


def sum_of(results: Iterable[Gradients]) -> Gradients:
    """What calls give together, in their order."""
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    for of_weight, of_bias in results:
        weight, bias = add(weight, of_weight), add(bias, of_bias)
    return weight, bias


def add(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of what there is."""
    return other if one is None else one if other is None else one + other


class _Tap(Function):
    """The node of autograd behind a tap."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return weight.detach(), None if bias is None else bias.detach()

    @staticmethod
    def backward(ctx: Any, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Any:
        of_weight, of_bias = in_precision(ctx.pending.dtypes, ctx.pending.collect())
        return None, add(of_weight, weight), add(of_bias, bias)
