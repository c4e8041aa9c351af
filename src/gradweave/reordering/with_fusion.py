"""Updates that follow their weight gradients: backward-fusion on the stream where these are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from gradweave._compat.eager import NO_BACKWARD, at_end_of_backward, current_backward
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.task import Gradients, Task
from gradweave.reordering.cross_step import Weights, is_of_layer
from gradweave.reordering.deferred_gradients import HandedOn, can_wait


class Following:
    """Hands stand-ins on for gradients that backward-fusion uses up before backward ends.

    Autograd brings them to its hooks as soon as backward is through with the layer; the update then asks for the
    real ones where they are computed. What no update has taken by the end of backward is finished there.

    Args:
        queue: Where backward leaves the tasks.
        takes_late: Whether the next that uses a parameter's gradient is an update that can wait for it.

    Attributes:
        weights: Of the layers of the forward that ran last, if their updates are to follow.
    """

    def __init__(self, queue: WeightGradientQueue, takes_late: Callable[[torch.Tensor], bool]) -> None:
        self.weights: Weights = {}
        self._queue = queue
        self._takes_late = takes_late
        self._open: list[HandedOn] = []
        self._backward = NO_BACKWARD
        queue.late = self

    def take(
        self, layer: int, weight: torch.Tensor, bias: torch.Tensor | None, tasks: Sequence[Task]
    ) -> Gradients | None:
        """Stand-ins for the gradients of a weight and its bias; None if they are to be waited for."""
        if not tasks or torch.is_grad_enabled() or not is_of_layer(self.weights, layer, weight, bias):
            return None
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
        self.wait()
        self.weights = weights

    def wait(self) -> None:
        """After a backward that failed: finishes everything, and waits for updates that are under way."""
        if self._backward != NO_BACKWARD:
            if (stream := self._queue.place.stream) is not None:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            self.settle()

    def settle(self) -> None:
        """Finishes everything, on the stream of the backward."""
        self._backward = NO_BACKWARD
        with ExitStack() as everything:
            for layer in self._open:
                everything.callback(layer.settle_in_place if layer.is_wanted else layer.drop)
            self._open = []

    def close(self) -> None:
        """Finishes everything; gradients are waited for from now on."""
        self.wait()
        self.settle()
        self._queue.late = None
