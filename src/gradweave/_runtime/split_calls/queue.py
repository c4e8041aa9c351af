"""Weight gradients that are still to be finished, oldest first, within a bound of bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from gradweave._compat.eager import NO_BACKWARD, at_end_of_backward, current_backward
from gradweave._runtime.split_calls.task import Gradients, Recorder, Task


class Place(Protocol):
    """Where tasks run."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Another one than the backward's; None if there is none."""

    def start(self, task: Task) -> None:
        """The task's inputs are there: it may begin."""

    def wait(self, task: Task) -> None:
        """From here on the current stream may use the task's results, and its inputs' memory."""


class InLine:
    """The stream of the backward, on which tasks run when their gradients are asked for."""

    stream = None

    def start(self, task: Task) -> None:
        """Do nothing ahead."""

    def wait(self, task: Task) -> None:
        """Return at once: there is only one stream."""


class Late(Protocol):
    """Who may have gradients handed on before they are computed."""

    def take(
        self, layer: int, weight: torch.Tensor, bias: torch.Tensor | None, tasks: Sequence[Task]
    ) -> Gradients | None:
        """Stand-ins for the gradients of a weight and its bias; None if they are to be waited for."""


class WeightGradientQueue:
    """Where backward leaves weight gradients until somebody asks for them.

    It does not keep tasks alive: those of a backward that has failed go with its graph.

    Args:
        place: Where they run.
        byte_budget: What unfinished tasks may hold; beyond it the oldest are finished. None for no bound.

    Attributes:
        most_held: The most bytes that unfinished tasks ever held.
        recorder: Sees when weight gradients run, if there is one.
        late: What is asked before a gradient is waited for in backward; None for always.
    """

    def __init__(self, place: Place, byte_budget: int | None = None) -> None:
        self.place = place
        self.byte_budget = byte_budget
        self.most_held = 0
        self.recorder: Recorder | None = None
        self.late: Late | None = None
        self._lock = threading.RLock()
        self._unfinished: dict[int, weakref.ref[Task]] = {}
        self._numbers: weakref.WeakKeyDictionary[Task, int] = weakref.WeakKeyDictionary()
        self._added = 0
        self._backwards: dict[int, list[weakref.ref[Task]]] = {}

    @property
    def held(self) -> int:
        """Bytes that unfinished tasks hold."""
        with self._lock:
            return sum(task.held for task in self._alive())

    def _alive(self) -> list[Task]:
        """Unfinished tasks, oldest first."""
        tasks = [task for ref in self._unfinished.values() if (task := ref()) is not None]
        if len(tasks) < len(self._unfinished):
            self._unfinished = {self._numbers[task]: weakref.ref(task) for task in tasks}
        return tasks

    def add(self, task: Task) -> None:
        """Leaves a task; finishes what is too much."""
        with self._lock:
            if self.recorder is not None:
                task.record(self.recorder)
            self._note(task)
            self.place.start(task)
            self._keep_within_budget()

    def outlive(self, task: Task) -> None:
        """Lets a task go on past the end of its backward; finishes what is too much."""
        with self._lock:
            task.outlive()
            self._keep_within_budget()

    def _keep_within_budget(self) -> None:
        if self.byte_budget is not None:
            waiting = self._alive()
            held = sum(one.held for one in waiting)
            for oldest in waiting:
                if held <= self.byte_budget:
                    break
                held -= oldest.held
                self.finish(oldest)
        self.most_held = max(self.most_held, self.held)

    def _note(self, task: Task) -> None:
        self._added += 1
        self._numbers[task] = self._added
        self._unfinished[self._added] = weakref.ref(task)
        running = current_backward()
        if running == NO_BACKWARD:
            return
        if running not in self._backwards:
            self._backwards[running] = []
            at_end_of_backward(lambda: self._end(running))
        self._backwards[running].append(weakref.ref(task))

    def finish(self, task: Task) -> None:
        """Makes a task's gradients ready for the current stream."""
        with self._lock:
            if not task.is_finished:
                self.place.wait(task)
                self._unfinished.pop(self._numbers[task], None)
                task.finish()

    def finish_and_take(self, task: Task) -> Gradients:
        """Makes a task's gradients ready for the current stream, and hands them over."""
        self.finish(task)
        return task.take()

    def make_ready(self, task: Task) -> None:
        """Makes a task's gradients ready for the current stream; its inputs stay alive until it is finished."""
        with self._lock:
            self.place.wait(task)
            task.compute()
            task.check_inputs()

    def _end(self, backward: int) -> None:
        """Lets go of what a backward has left and not asked for, as when only gradients of inputs are wanted."""
        with self._lock:
            for ref in self._backwards.pop(backward, ()):
                task = ref()
                if task is not None and not task.is_finished and not task.outlives:
                    self.drop(task)

    def drop(self, task: Task) -> None:
        """Lets go of a task that nobody will ask for, and of its inputs' memory."""
        with self._lock:
            self.place.wait(task)
            self._unfinished.pop(self._numbers[task], None)
            task.drop()
