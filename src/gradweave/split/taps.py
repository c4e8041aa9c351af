"""Where a weight enters its layers: the place in backward at which its gradient comes out.

A tap stands between a weight and the calls that use it. Each call leaves a task in the tap instead of
a gradient. Autograd runs the tap once all of these calls are through, and the tap hands the sum of their
gradients on, as autograd would: hooks on the weight, accumulation, tied weights and DDP see what they
always see. Of the nodes that are ready, autograd runs the one made last. So a tap that is made right at
its first use runs in stock order, and one that was made before the forward began runs when the chain of
input gradients has come to its end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from gradweave.compat import current_backward
from gradweave.split.queue import Gradients, Task, WeightGradientQueue


class Tap:
    """A weight and its bias as layers are to use them, in one forward.

    Attributes:
        weight: Stands for the weight.
        bias: Stands for the bias, if there is one.
        layer: A number for the weight.
    """

    def __init__(self, layer: int, weight: torch.Tensor, bias: torch.Tensor | None, queue: WeightGradientQueue) -> None:
        self.layer = layer
        self.queue = queue
        self._tasks: dict[int, list[Task]] = {}
        self.weight, self.bias = _Tap.apply(self._collect, weight, bias)  # type: ignore[no-untyped-call]

    def leave(self, task: Task) -> None:
        """Leaves the weight gradient of a call; called in backward."""
        self._tasks.setdefault(current_backward(), []).append(task)
        self.queue.add(task)

    def _collect(self) -> Gradients:
        """The sums over all calls, in the order in which this backward came to them.

        Another one over the same graph may have left tasks that it did not ask for.
        """
        tasks = self._tasks.pop(current_backward(), [])
        weight: torch.Tensor | None = None
        bias: torch.Tensor | None = None
        for task in tasks:
            of_weight, of_bias = self.queue.finish(task)
            weight = _sum(weight, of_weight)
            bias = _sum(bias, of_bias)
        return weight, bias


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one + other


class _Tap(Function):
    """The node of autograd behind a tap."""

    @staticmethod
    def forward(ctx: Any, collect: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        ctx.collect = collect
        ctx.set_materialize_grads(False)
        return weight.detach(), None if bias is None else bias.detach()

    @staticmethod
    def backward(ctx: Any, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Any:
        of_weight, of_bias = ctx.collect()
        return None, _sum(of_weight, weight), _sum(of_bias, bias)
