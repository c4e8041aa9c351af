"""Updates that follow their weight gradients: backward-fusion on the stream where these are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradweave.compat.eager import NO_BACKWARD, at_end_of_backward, current_backward
from gradweave.split.crossing import Weights
from gradweave.split.handed_on import HandedOn, can_wait
from gradweave.split.queue import Gradients, Task, WeightGradientQueue


class Following:
    """Hands stand-ins on for gradients that backward-fusion uses up before backward ends.

    Autograd brings them to its hooks as soon as backward is through with the layer; the update then asks for the
    real ones where they are computed. What no update has taken by the end of backward is finished there.

    Args:
        queue: Where backward leaves the tasks.
        takes_late: Whether the next that uses a parameter's gradient is an update that can wait for it.

    Attributes:
        weights: Of the forward that ran last.
    """

    def __init__(self, queue: WeightGradientQueue, takes_late: Callable[[torch.Tensor], bool]) -> None:
        self.weights: Weights = {}
        self._queue = queue
        self._takes_late = takes_late
        self._open: list[HandedOn] = []
        self._backward = NO_BACKWARD
        queue.late = self

    def take(self, layer: int, tasks: Sequence[Task]) -> Gradients | None:
        """Stand-ins for a layer's gradients; None if they are to be waited for."""
        if layer not in self.weights or not tasks or torch.is_grad_enabled():
            return None
        weight, bias = self.weights[layer]
        params = [weight] if bias is None else [weight, bias]
        if not all(can_wait(p) and self._takes_late(p) for p in params):
            return None
        for task in tasks:
            task.outlives = True
        if self._backward != current_backward():
            self._backward = current_backward()
            at_end_of_backward(self.settle)
        made = HandedOn(self._queue, list(tasks), params)
        self._open = [layer for layer in self._open if not layer.is_over]
        self._open.append(made)
        return made.stand_ins()

    def begin_forward(self, weights: Weights) -> None:
        """Takes note of the weights as they are now; finishes what a backward that failed has left."""
        self.settle()
        self.weights = weights

    def settle(self) -> None:
        """Finishes everything, on the stream of the backward."""
        self._backward = NO_BACKWARD
        layers, self._open = self._open, []
        for layer in layers:
            if layer.is_wanted:
                layer.settle_in_place()
            else:
                layer.drop()

    def close(self) -> None:
        """Finishes everything; gradients are waited for from now on."""
        self.settle()
        self._queue.late = None
