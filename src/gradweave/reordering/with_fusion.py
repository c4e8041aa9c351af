"""Backward-fusion on the stream of the weight gradients: updates that follow these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from gradweave._runtime.backward import BackwardEnd
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.shared_nodes import Weights
from gradweave._runtime.split_calls.task import Gradients, Task
from gradweave.reordering.deferred_gradients import DeferredLayerGradients, are_of_layer, may_defer


class FusedUpdateDeferral:
    """Deferral of gradients that backward-fusion uses before backward ends.

    Autograd brings the stand-ins to the fusion's hooks as soon as backward has finished with the layer; the update then
    asks for the real gradients on the stream on which they are computed. What no update has taken by the end of the
    backward is finished there.

    Args:
        queue: The queue in which backward leaves the tasks.
        takes_late: Returns whether the next use of a parameter's gradient is an update that can wait for it.

    Attributes:
        weights: Weights, in the forward that ran last, of the layers whose updates follow their gradients.
    """

    def __init__(self, queue: WeightGradientQueue, takes_late: Callable[[torch.Tensor], bool]) -> None:
        self.weights: Weights = {}
        self._queue = queue
        self._takes_late = takes_late
        self._pending: list[DeferredLayerGradients] = []
        self._end = BackwardEnd(lambda _: self.settle())
        queue.deferral = self

    def defer(
        self, layer: int, weight: torch.Tensor, bias: torch.Tensor | None, tasks: Sequence[Task]
    ) -> Gradients | None:
        """Return stand-ins for the gradients of a weight and its bias; None if backward must wait for these."""
        if not tasks or torch.is_grad_enabled() or not are_of_layer(self.weights, layer, weight, bias):
            return None
        params = [weight] if bias is None else [weight, bias]
        if not all(may_defer(p) and self._takes_late(p) for p in params):
            return None
        for task in tasks:
            task.outlives_backward = True  # the queue must not drop it at the end: settle() may come after that
        self._end.note()
        deferred = DeferredLayerGradients(self._queue, list(tasks), params)
        self._pending = [layer for layer in self._pending if not layer.is_over]
        self._pending.append(deferred)
        return deferred.stand_ins()

    def begin_forward(self, weights: Weights) -> None:
        """Note the weights as they are now; finish what a backward that has failed has left."""
        self.wait()
        self.weights = weights

    def wait(self) -> None:
        """Finish what a backward that has failed has left, and wait for updates that are still running."""
        if self._end.is_pending:
            self._end.forget()
            if (stream := self._queue.lane.stream) is not None:
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            self.settle()

    def settle(self) -> None:
        """Finish everything on the stream of the backward, also where one of the computations fails."""
        with ExitStack() as stack:  # which runs all callbacks, and raises after the last
            for layer in self._pending:
                stack.callback(layer.settle_in_place if layer.is_wanted else layer.drop)
            self._pending = []

    def close(self) -> None:
        """Finish everything; backward waits for gradients from now on."""
        self.wait()
        self.settle()
        self._queue.deferral = None
