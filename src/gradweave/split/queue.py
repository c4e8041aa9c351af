"""Weight gradients that are still to be computed, oldest first, within a bound of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

Gradients = tuple[torch.Tensor | None, torch.Tensor | None]
"""Of a weight and of its bias."""


class Task:
    """The weight gradient of one call of a layer.

    Attributes:
        layer: Of which weight; the same for all calls that use it.
        held: Bytes that stay alive until it has run, besides those that forward keeps anyway.
    """

    def __init__(self, layer: int, held: Sequence[torch.Tensor], compute: Callable[[], Gradients]) -> None:
        self.layer = layer
        self.held = sum(tensor.numel() * tensor.element_size() for tensor in held)
        self._compute: Callable[[], Gradients] | None = compute
        self._result: Gradients = (None, None)

    @property
    def is_done(self) -> bool:
        """Whether it has run."""
        return self._compute is None

    def run(self) -> Gradients:
        """Computes the gradients, the first time it is called."""
        if self._compute is not None:
            self._result = self._compute()
            self._compute = None
        return self._result


class WeightGradientQueue:
    """Where backward leaves weight gradients, for a policy to say when they run.

    Args:
        byte_budget: What tasks that wait may hold; beyond it the oldest run. None for no bound.

    Attributes:
        held: Bytes that waiting tasks hold.
        most_held: The most there ever were.
    """

    def __init__(self, byte_budget: int | None = None) -> None:
        self.byte_budget = byte_budget
        self.held = 0
        self.most_held = 0
        self._waiting: deque[Task] = deque()

    def add(self, task: Task) -> None:
        """Leaves a task; runs what is too much."""
        self._waiting.append(task)
        self.held += task.held
        while self._waiting and self.byte_budget is not None and self.held > self.byte_budget:
            self.run(self._waiting[0])
        self.most_held = max(self.most_held, self.held)

    def run(self, task: Task) -> Gradients:
        """Runs a task now, unless it has run."""
        if not task.is_done:
            self._waiting.remove(task)
            self.held -= task.held
        return task.run()

    def clear(self) -> None:
        """Forgets what waits: the backward that left it has failed."""
        self._waiting.clear()
        self.held = 0
