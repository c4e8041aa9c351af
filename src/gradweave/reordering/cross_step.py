"""Weight gradients that cross the border of a step: finished just before their update, in the next forward.

A weight's ``.grad`` is a stand-in meanwhile. Forward-fusion takes it over at ``step()`` and has it finished when the
update begins; any other use of it finishes it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradweave._compat.autograd import gradient_hooks
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.shared_nodes import Weights
from gradweave._runtime.split_calls.task import Gradients, Task
from gradweave.reordering.deferred_gradients import DeferredLayerGradients, are_of_layer, may_defer


class CrossStepDeferral:
    """Deferral of some layers' gradients into the next forward.

    Backward waits for a layer's gradient after all where it is needed there: for gradients to accumulate onto, hooks on
    the weight, an input that the loop may write to, and in a CUDA graph of one step that is being captured, which must
    end with all of its work joined.

    Args:
        queue: The queue in which backward leaves the tasks.
        layers: Layers whose gradients may cross.
        may_cross_in_graph: Returns whether a CUDA graph that is being captured holds the next step too.

    Attributes:
        weights: Weights of the forward that ran last.
        crossed: Number of gradients that were deferred.
    """

    def __init__(
        self,
        queue: WeightGradientQueue,
        layers: frozenset[int],
        may_cross_in_graph: Callable[[], bool] = lambda: False,
    ) -> None:
        self.layers = layers
        self._may_cross_in_graph = may_cross_in_graph
        self.weights: Weights = {}
        self.crossed = 0
        self._queue = queue
        self._pending: list[DeferredLayerGradients] = []
        queue.deferral = self

    def defer(
        self, layer: int, weight: torch.Tensor, bias: torch.Tensor | None, tasks: Sequence[Task]
    ) -> Gradients | None:
        """Return stand-ins for the gradients of a weight and its bias; None if backward must wait for these."""
        if layer not in self.layers or not tasks or not are_of_layer(self.weights, layer, weight, bias):
            return None
        if _is_capturing() and not self._may_cross_in_graph():
            return None
        if torch.is_grad_enabled() or not all(task.can_outlive_backward for task in tasks):
            return None
        params = [weight] if bias is None else [weight, bias]
        if not all(may_defer(p) and not gradient_hooks(p) for p in params):
            return None
        for task in tasks:
            self._queue.outlive_backward(task)
        deferred = DeferredLayerGradients(self._queue, list(tasks), params)
        self._pending.append(deferred)
        self.crossed += 1
        return deferred.stand_ins()

    def begin_forward(self, weights: Weights) -> None:
        """Note the weights as they are now; finish or drop gradients that no step has taken over since backward."""
        pending = []
        for layer in self._pending:
            if not layer.is_wanted:
                layer.drop()
            elif layer.is_in_grad:
                layer.settle()
            elif not layer.is_over:
                pending.append(layer)
        self._pending = pending
        self.weights = weights

    def close(self) -> None:
        """Finish everything; no gradient crosses from now on."""
        self.layers = frozenset()
        for layer in self._pending:
            if layer.is_wanted:
                layer.settle()
            else:
                layer.drop()
        self._pending = []


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
