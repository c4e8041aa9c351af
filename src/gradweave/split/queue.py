"""Weight gradients that are still to be finished, oldest first, within a bound of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from gradweave.compat import NO_BACKWARD, at_end_of_backward, current_backward

Gradients = tuple[torch.Tensor | None, torch.Tensor | None]
"""Of a weight and of its bias."""


class Task:
    """The weight gradient of one call of a layer.

    Attributes:
        layer: Of which weight; the same for all calls that use it.
        held: Bytes that stay alive until it is finished, besides those that forward keeps anyway.
    """

    def __init__(self, layer: int, held: Sequence[torch.Tensor], compute: Callable[[], Gradients]) -> None:
        self.layer = layer
        self.held = sum(tensor.numel() * tensor.element_size() for tensor in held)
        self._compute: Callable[[], Gradients] | None = compute
        self._result: Gradients | None = None

    @property
    def is_finished(self) -> bool:
        """Whether its inputs are no longer needed."""
        return self._compute is None

    def compute(self) -> None:
        """Computes the gradients, on the current stream, unless it was done; the inputs stay alive."""
        if self._result is None and self._compute is not None:
            self._result = self._compute()

    def finish(self) -> Gradients:
        """The gradients; lets go of the inputs."""
        self.compute()
        self._compute = None
        return self._result or (None, None)

    def drop(self) -> None:
        """Lets go of inputs and results: nobody will ask."""
        self._compute = self._result = None


class Place(Protocol):
    """Where tasks run."""

    def start(self, task: Task) -> None:
        """The task's inputs are there: it may begin."""

    def wait(self, task: Task) -> None:
        """From here on the current stream may use the task's results, and its inputs' memory."""


class WeightGradientQueue:
    """Where backward leaves weight gradients until somebody asks for them.

    Args:
        place: Where they run.
        byte_budget: What unfinished tasks may hold; beyond it the oldest are finished. None for no bound.

    Attributes:
        held: Bytes that unfinished tasks hold.
        most_held: The most there ever were.
    """

    def __init__(self, place: Place, byte_budget: int | None = None) -> None:
        self.place = place
        self.byte_budget = byte_budget
        self.held = 0
        self.most_held = 0
        self._unfinished: deque[Task] = deque()
        self._backwards: dict[int, list[Task]] = {}

    def add(self, task: Task) -> None:
        """Leaves a task; finishes what is too much."""
        running = current_backward()
        if running not in self._backwards:
            self._backwards[running] = []
            if running != NO_BACKWARD:
                at_end_of_backward(lambda: self._forget(self._backwards.pop(running, [])))
        self._backwards[running].append(task)
        self._unfinished.append(task)
        self.held += task.held
        self.place.start(task)
        while self._unfinished and self.byte_budget is not None and self.held > self.byte_budget:
            self.finish(self._unfinished[0])
        self.most_held = max(self.most_held, self.held)

    def finish(self, task: Task) -> Gradients:
        """The gradients of a task."""
        if not task.is_finished:
            self.place.wait(task)
            self._unfinished.remove(task)
            self.held -= task.held
        return task.finish()

    def clear(self) -> None:
        """Waits for what is under way and forgets it: the backward that left it has failed."""
        self._forget(list(self._unfinished))
        self._backwards.clear()

    def _forget(self, tasks: Sequence[Task]) -> None:
        """Lets go of what nobody has asked for, as when only gradients of inputs were wanted."""
        for task in tasks:
            if not task.is_finished:
                self.place.wait(task)
                self._unfinished.remove(task)
                self.held -= task.held
                task.drop()
