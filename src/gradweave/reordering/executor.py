"""Carrying out a schedule: which weight gradients run beside backward, in which order, and from when on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from weakref import WeakSet, WeakValueDictionary

import torch

from gradweave._compat.eager import NO_BACKWARD, current_backward
from gradweave._runtime.split_calls.queue import Place
from gradweave._runtime.split_calls.task import Task
from gradweave.errors import ArgumentError
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Kind
from gradweave.schedule.tasks import Task as ScheduledTask

Turn = tuple[int, int | None]
"""A layer, and the layer whose input gradient must have been begun before its weight gradient may."""


def turns_of(schedule: Schedule, layer_of: Mapping[int, int]) -> tuple[Turn, ...]:
    """The weight gradients that a schedule of one device has on its second stream, in their order.

    Those that it puts off into the next forward begin when the last input gradient has been begun.

    Args:
        schedule: Of one step, or the first of several.
        layer_of: The executor's number for a layer of the schedule; what it does not have is not its own.
    """
    if len(schedule.lanes) != 2:
        raise ArgumentError("schedule", schedule.policy, "give one of two streams on one device")
    turns: list[Turn] = []
    for layer, before in _on_second_stream(schedule):
        if layer not in layer_of:
            continue
        if before is not None and before.kind is Kind.F and before.step > 0:
            turns.append((layer_of[layer], layer_of[min(layer_of)]))
        else:
            after = layer_of.get(before.layer) if before is not None and before.kind is Kind.X else None
            turns.append((layer_of[layer], after))
    return tuple(turns)


def crossing_in(schedule: Schedule, layer_of: Mapping[int, int]) -> frozenset[int]:
    """The layers whose weight gradients a schedule puts off into the next forward."""
    return frozenset(
        layer_of[layer]
        for layer, before in _on_second_stream(schedule)
        if layer in layer_of and before is not None and before.kind is Kind.F and before.step > 0
    )


def _on_second_stream(schedule: Schedule) -> Iterator[tuple[int, ScheduledTask | None]]:
    """Layers of the first step's weight gradients there, and the task that each waits for besides its inputs."""
    tasks = schedule.graph.tasks
    waits = dict(schedule.waits)
    for index in schedule.lanes[1].tasks:
        if tasks[index].kind is Kind.W and tasks[index].step == 0:
            yield tasks[index].layer, tasks[waits[index]] if index in waits else None


@dataclass
class _Progress:
    """How far a backward has come.

    Attributes:
        left: Turns that have not come.
        begun: Layers whose input gradient has been begun.
        waiting: Tasks whose turn has not come; a backward that fails takes them along.
        gone: Layers whose task has begun, or was asked for before its turn.
    """

    left: deque[Turn]
    begun: set[int] = field(default_factory=set)
    waiting: WeakValueDictionary[int, Task] = field(default_factory=WeakValueDictionary)
    gone: set[int] = field(default_factory=set)


class Planned:
    """Gives tasks to another place when their turn has come; those without a turn run in line.

    Args:
        place: For those that have a turn.
        turns: As :func:`turns_of` gives them.
    """

    def __init__(self, place: Place, turns: tuple[Turn, ...]) -> None:
        self._place = place
        self._turns = turns
        self._own = {layer for layer, _ in turns}
        self._given: WeakSet[Task] = WeakSet()
        self._backward = NO_BACKWARD
        self._progress = _Progress(deque())

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Of the other place."""
        return self._place.stream

    def start(self, task: Task) -> None:
        """Notes that a layer's input gradient has been begun, and its weight gradient can be."""
        if current_backward() != self._backward:
            self._backward = current_backward()
            self._progress = _Progress(deque(self._turns))
        progress = self._progress
        progress.begun.add(task.layer)
        if task.layer in self._own and task.layer not in progress.waiting and task.layer not in progress.gone:
            progress.waiting[task.layer] = task
        else:
            task.compute()
        self._take_turns(progress)

    def wait(self, task: Task) -> None:
        """Lets the current stream wait for a task that is elsewhere; one whose turn has not come runs in line."""
        if task in self._given:
            self._place.wait(task)
        elif self._progress.waiting.get(task.layer) is task:
            del self._progress.waiting[task.layer]
            self._progress.gone.add(task.layer)

    def _take_turns(self, progress: _Progress) -> None:
        while progress.left:
            layer, after = progress.left[0]
            if layer not in progress.gone:
                if layer not in progress.waiting or (after is not None and after not in progress.begun):
                    return
                task = progress.waiting.pop(layer)
                progress.gone.add(layer)
                self._place.start(task)
                self._given.add(task)
            progress.left.popleft()
