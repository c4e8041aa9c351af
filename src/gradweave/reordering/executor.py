"""Execution of a schedule: which weight gradients run on the second stream, in which order, and from when on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from weakref import WeakSet, WeakValueDictionary

import torch

from gradweave._compat.autograd import NO_BACKWARD, current_backward
from gradweave._runtime.split_calls.queue import Lane
from gradweave._runtime.split_calls.task import Task
from gradweave.errors import UnsupportedError
from gradweave.schedule.builders import single
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies import plan
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Buffer, Kind
from gradweave.schedule.tasks import Task as ScheduledTask

PlannedPolicy = Literal["joint", "cross_step"]
Turn = tuple[int, int | None]
"""A layer, and the layer whose input gradient must have been launched before its weight gradient may be."""


def plan_within_budget(costs: Costs, policy: PlannedPolicy, byte_budget: int | None) -> Schedule:
    """Return the schedule of a policy in which unfinished weight gradients hold at most a number of bytes.

    Those that exceed the budget by themselves are in line, as the queue of weight gradients runs them.

    Args:
        costs: Costs of the model's layers.
        policy: The policy.
        byte_budget: Most bytes that unfinished weight gradients may hold; None for no bound.

    Returns:
        A schedule; with a budget, the buffers of its graph are those of unfinished weight gradients alone.
    """
    if byte_budget is None:
        return plan(single(costs), policy=policy)
    sizes = [_held_bytes(layer, policy) for layer in costs.layers]
    inline = frozenset(number for number, size in enumerate(sizes) if size > byte_budget)
    planned = replace(
        costs,
        layers=tuple(
            _with_weight_gradient_in_line(layer) if number in inline else layer
            for number, layer in enumerate(costs.layers)
        ),
    )
    graph = single(planned)
    # Policies bound all bytes of a device, which those of the forward dominate; the budget is for unfinished weight
    # gradients. So these are the only ones that the policy sees. Stock order, with one at a time, is within any budget.
    graph = replace(graph, buffers=_buffers(graph, [0 if n in inline else size for n, size in enumerate(sizes)]))
    return _move_in_line(plan(graph, policy=policy, byte_budget=byte_budget), inline)


def _held_bytes(layer: LayerCost, policy: PlannedPolicy) -> int:
    """Return the bytes that the unfinished weight gradient of a layer holds, besides those that forward keeps anyway.

    Within backward that is the output gradient; beyond it, the input too.
    """
    return layer.output_bytes + (layer.input_bytes if policy == "cross_step" else 0)


def _with_weight_gradient_in_line(layer: LayerCost) -> LayerCost:
    return replace(layer, input_grad=layer.input_grad + layer.weight_grad, weight_grad=0.0)


def _buffers(graph: TaskGraph, sizes: Sequence[int]) -> tuple[Buffer, ...]:
    """Return buffers that live from the start of each layer's X, in which its W is queued, to the end of its W."""
    return tuple(
        Buffer(sizes[task.layer], task.resource, (graph.index[Kind.X, task.layer, 0, task.step], number))
        for number, task in enumerate(graph.tasks)
        if task.kind is Kind.W
    )


def _move_in_line(schedule: Schedule, layers: frozenset[int]) -> Schedule:
    """Move the weight gradients of some layers from the second stream to their places in stock order."""
    tasks, index = schedule.graph.tasks, schedule.graph.index
    moved = {task for task in schedule.lanes[1].tasks if tasks[task].kind is Kind.W and tasks[task].layer in layers}
    successor = {index[Kind.X, tasks[task].layer, 0, tasks[task].step]: task for task in moved}
    main, side = schedule.lanes
    return replace(
        schedule,
        lanes=(
            replace(main, tasks=tuple(t for x in main.tasks for t in ((successor[x], x) if x in successor else (x,)))),
            replace(side, tasks=tuple(task for task in side.tasks if task not in moved)),
        ),
        waits=tuple(wait for wait in schedule.waits if wait[0] not in moved),
    )


def turns_of(schedule: Schedule, layer_of: Mapping[int, int]) -> tuple[Turn, ...]:
    """Return the weight gradients that a schedule of one device has on its second stream, in their order.

    Those that it puts off into the next forward begin when the last input gradient has been launched.

    Args:
        schedule: A schedule of one step, or of several, of which the first counts.
        layer_of: The executor's number for a layer of the schedule; it has no turns for other layers.
    """
    if len(schedule.lanes) != 2:
        raise UnsupportedError(
            f"schedule {schedule.policy!r}",
            "it is not one of two streams on one device",
            "give one of side_stream, joint or cross_step",
        )
    turns: list[Turn] = []
    for layer, before in _on_second_stream(schedule):
        if layer not in layer_of:
            continue
        if _is_in_next_forward(before):
            turns.append((layer_of[layer], layer_of[min(layer_of)]))
        else:
            after = layer_of.get(before.layer) if before is not None and before.kind is Kind.X else None
            turns.append((layer_of[layer], after))
    return tuple(turns)


def crossing_in(schedule: Schedule, layer_of: Mapping[int, int]) -> frozenset[int]:
    """Return the layers whose weight gradients a schedule puts off into the next forward."""
    return frozenset(
        layer_of[layer]
        for layer, before in _on_second_stream(schedule)
        if layer in layer_of and _is_in_next_forward(before)
    )


def _on_second_stream(schedule: Schedule) -> Iterator[tuple[int, ScheduledTask | None]]:
    """Yield the layer of each weight gradient of the first step there, and the task that it waits for, if any."""
    tasks = schedule.graph.tasks
    waits = dict(schedule.waits)
    for index in schedule.lanes[1].tasks:
        if tasks[index].kind is Kind.W and tasks[index].step == 0:
            yield tasks[index].layer, tasks[waits[index]] if index in waits else None


def _is_in_next_forward(before: ScheduledTask | None) -> bool:
    return before is not None and before.kind is Kind.F and before.step > 0


@dataclass
class _Progress:
    """The progress of a backward through a plan.

    Attributes:
        turns: Turns that have not come.
        launched: Layers whose input gradient has been launched.
        waiting: Tasks whose turn has not come, weakly: a backward that fails takes them along.
        passed: Layers whose task has begun, or was asked for before its turn.
    """

    turns: deque[Turn]
    launched: set[int] = field(default_factory=set)
    waiting: WeakValueDictionary[int, Task] = field(default_factory=WeakValueDictionary)
    passed: set[int] = field(default_factory=set)


class PlannedLane:
    """Weight gradients with turns, each started on another lane when its turn has come; the others run in line.

    Args:
        lane: Runs the tasks that have a turn.
        turns: The turns, as :func:`turns_of` returns them.
    """

    def __init__(self, lane: Lane, turns: tuple[Turn, ...]) -> None:
        self._lane = lane
        self._turns = turns
        self._layers = {layer for layer, _ in turns}
        self._started: WeakSet[Task] = WeakSet()
        self._backward = NO_BACKWARD
        self._progress = _Progress(deque())

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of the other lane."""
        return self._lane.stream

    def start(self, task: Task) -> None:
        """Note that a layer's input gradient has been launched; start all tasks whose turns have come."""
        if current_backward() != self._backward:
            # Each backward begins the plan from its start: no callback tells of the end of one that has failed.
            self._backward = current_backward()
            self._progress = _Progress(deque(self._turns))
        progress = self._progress
        progress.launched.add(task.layer)
        if task.layer in self._layers and task.layer not in progress.waiting and task.layer not in progress.passed:
            progress.waiting[task.layer] = task
        else:
            task.compute()
        self._take_turns(progress)

    def wait(self, task: Task) -> None:
        """Let the current stream wait for a task on the other lane; one whose turn has not come runs in line."""
        if task in self._started:
            self._lane.wait(task)
        elif self._progress.waiting.get(task.layer) is task:
            del self._progress.waiting[task.layer]
            self._progress.passed.add(task.layer)

    def _take_turns(self, progress: _Progress) -> None:
        while progress.turns:
            layer, after = progress.turns[0]
            if layer not in progress.passed:
                if layer not in progress.waiting or (after is not None and after not in progress.launched):
                    return
                task = progress.waiting.pop(layer)
                progress.passed.add(layer)
                self._lane.start(task)
                self._started.add(task)
            progress.turns.popleft()
