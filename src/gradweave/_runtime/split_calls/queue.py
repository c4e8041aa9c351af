"""A queue of unfinished weight gradients, oldest first, within a bound of bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from gradweave._compat.autograd import NO_BACKWARD, current_backward
from gradweave._runtime.backward import BackwardEnd
from gradweave._runtime.split_calls.task import Gradients, Recorder, Task


class Lane(Protocol):
    """The stream, and the time, at which tasks run."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of the tasks, if it is not that of the backward."""

    def start(self, task: Task) -> None:
        """Compute a task whose inputs have been made, or leave it for later."""

    def wait(self, task: Task) -> None:
        """Let the current stream wait for a task: it then may use the results, and the memory of the inputs."""


class InlineLane:
    """The stream of the backward, on which tasks run when their gradients are asked for."""

    stream = None

    def start(self, task: Task) -> None:
        """Do nothing ahead."""

    def wait(self, task: Task) -> None:
        """Return at once: there is only one stream."""


class Deferral(Protocol):
    """A technique that hands stand-ins to autograd in place of gradients that are still being computed."""

    def defer(
        self, layer: int, weight: torch.Tensor, bias: torch.Tensor | None, tasks: Sequence[Task]
    ) -> Gradients | None:
        """Return stand-ins for the gradients of a weight and its bias; None if backward must wait for these.

        Args:
            layer: Number of the layer.
            weight: The weight.
            bias: Its bias, if there is one.
            tasks: The tasks whose results sum up to the gradients.
        """


class WeightGradientQueue:
    """Weight gradients that backward has left for later.

    The queue keeps no task alive: the graph does, so that the tasks of a backward that has failed go with its graph.

    Args:
        lane: Runs the tasks.
        byte_budget: Most bytes that unfinished tasks may hold; beyond it the oldest are finished. None for no bound.

    Attributes:
        peak_bytes: Most bytes that unfinished tasks have held at once.
        recorder: Context for the computation of each task that is added from now on; None for none.
        deferral: Asked before backward waits for a gradient; None to wait for all.
    """

    def __init__(self, lane: Lane, byte_budget: int | None = None) -> None:
        self.lane = lane
        self.byte_budget = byte_budget
        self.peak_bytes = 0
        self.recorder: Recorder | None = None
        self.deferral: Deferral | None = None
        # Reentrant: finishing a task for the budget happens inside of add(). Autograd has a thread per device, and
        # the loop may run backwards in threads of its own.
        self._lock = threading.RLock()
        self._unfinished: dict[int, weakref.ref[Task]] = {}
        self._numbers: weakref.WeakKeyDictionary[Task, int] = weakref.WeakKeyDictionary()
        self._count = 0
        self._tasks_of_backward: dict[int, list[weakref.ref[Task]]] = {}
        self._end = BackwardEnd(self._end_backward)

    @property
    def held_bytes(self) -> int:
        """Bytes that unfinished tasks hold."""
        with self._lock:
            return sum(task.held_bytes for task in self._find_unfinished())

    def _find_unfinished(self) -> list[Task]:
        """Return unfinished tasks, oldest first."""
        tasks = [task for ref in self._unfinished.values() if (task := ref()) is not None]
        if len(tasks) < len(self._unfinished):
            self._unfinished = {self._numbers[task]: weakref.ref(task) for task in tasks}
        return tasks

    def add(self, task: Task) -> None:
        """Add a task; finish the oldest ones if that exceeds the budget."""
        with self._lock:
            if self.recorder is not None:
                task.record(self.recorder)
            self._enter(task)
            self.lane.start(task)
            self._keep_within_budget()

    def outlive_backward(self, task: Task) -> None:
        """Let a task be finished after the end of its backward; finish the oldest if that exceeds the budget."""
        with self._lock:
            task.outlive_backward()
            self._keep_within_budget()

    def _keep_within_budget(self) -> None:
        if self.byte_budget is not None:
            unfinished = self._find_unfinished()
            held_bytes = sum(task.held_bytes for task in unfinished)
            for oldest in unfinished:
                if held_bytes <= self.byte_budget:
                    break
                held_bytes -= oldest.held_bytes
                self.finish(oldest)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _enter(self, task: Task) -> None:
        self._count += 1
        self._numbers[task] = self._count
        self._unfinished[self._count] = weakref.ref(task)
        if current_backward() != NO_BACKWARD:
            self._tasks_of_backward.setdefault(self._end.note(), []).append(weakref.ref(task))

    def finish(self, task: Task) -> None:
        """Make the gradients of a task ready for the current stream, and release its inputs."""
        with self._lock:
            if not task.is_finished:
                self.lane.wait(task)
                self._unfinished.pop(self._numbers[task], None)
                task.finish()

    def finish_and_take(self, task: Task) -> Gradients:
        """Make the gradients of a task ready for the current stream, and return them."""
        self.finish(task)
        return task.take()

    def make_ready(self, task: Task) -> None:
        """Make the gradients of a task ready for the current stream; its inputs stay alive until it is finished."""
        with self._lock:
            self.lane.wait(task)
            task.compute()
            task.check_inputs()

    def _end_backward(self, backward: int) -> None:
        """Drop what a backward has left without asking for it, as one does that computes gradients of inputs alone."""
        with self._lock:
            for ref in self._tasks_of_backward.pop(backward, ()):
                task = ref()
                if task is not None and not task.is_finished and not task.outlives_backward:
                    self.drop(task)

    def drop(self, task: Task) -> None:
        """Release a task whose gradients are not wanted, and the memory of its inputs."""
        with self._lock:
            self.lane.wait(task)  # the current stream may use that memory again as soon as it is released
            self._unfinished.pop(self._numbers[task], None)
            task.drop()
