"""Weight gradients that cross the border of a step: finished just before their update, in the next forward.

A weight's ``.grad`` is a stand-in meanwhile. Forward-fusion takes it over at ``step()`` and has it finished
when the update begins; anybody else who uses it has it finished at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from gradweave._compat.eager import gradient_hooks
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.task import Gradients, Task
from gradweave.reordering.deferred_gradients import HandedOn, can_wait

Weights = Mapping[int, tuple[torch.Tensor, torch.Tensor | None]]
"""Weight and bias of a layer, by its number."""


def is_of_layer(weights: Weights, layer: int, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether weight and bias are those of a layer, and not a weight that it shares with another's bias."""
    own = weights.get(layer)
    return own is not None and own[0] is weight and own[1] is bias


class Crossing:
    """Hands stand-ins on for the gradients of some layers, and keeps what they come from.

    A layer's gradient is waited for in backward after all where something needs it there: gradients to
    accumulate onto, hooks on the weight, an input that the loop may write to, a CUDA graph of one step that is
    being captured and must end with all of its work joined.

    Args:
        queue: Where backward leaves the tasks.
        layers: Whose gradients may cross.
        may_cross_in_graph: Whether a CUDA graph that is being captured holds the next step too.

    Attributes:
        weights: Of the forward that ran last.
        crossed: How many gradients were handed on before they were there.
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
        self._open: list[HandedOn] = []
        queue.late = self

    def take(
        self, layer: int, weight: torch.Tensor, bias: torch.Tensor | None, tasks: Sequence[Task]
    ) -> Gradients | None:
        """Stand-ins for the gradients of a weight and its bias; None if they are to be waited for."""
        if layer not in self.layers or not tasks or not is_of_layer(self.weights, layer, weight, bias):
            return None
        if _capturing() and not self._may_cross_in_graph():
            return None
        if torch.is_grad_enabled() or not all(task.can_outlive for task in tasks):
            return None
        params = [weight] if bias is None else [weight, bias]
        if not all(can_wait(p) and not gradient_hooks(p) for p in params):
            return None
        for task in tasks:
            self._queue.outlive(task)
        made = HandedOn(self._queue, list(tasks), params)
        self._open.append(made)
        self.crossed += 1
        return made.stand_ins()

    def begin_forward(self, weights: Weights) -> None:
        """Takes note of the weights as they are now; finishes what nobody has taken over since backward."""
        still_open = []
        for layer in self._open:
            if not layer.is_wanted:
                layer.drop()
            elif layer.is_in_grad:
                layer.settle()
            elif not layer.is_over:
                still_open.append(layer)
        self._open = still_open
        self.weights = weights

    def close(self) -> None:
        """Finishes everything; no gradient crosses from now on."""
        self.layers = frozenset()
        for layer in self._open:
            if layer.is_wanted:
                layer.settle()
            else:
                layer.drop()
        self._open = []


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
