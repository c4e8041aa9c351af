"""Costs of the layers of a model, measured in real training steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._runtime.ab_trial import DeviceClock
from gradweave._runtime.module_hook import ModuleHook
from gradweave._runtime.split_calls.task import Task
from gradweave.parallel.data_parallel.layers import Layer
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.tasks import Kind

_Spans = defaultdict[tuple[Kind, int], list[tuple[Any, Any]]]
"""Begin and end of each run of a task, by kind and layer, in one step."""


class StepWatch:
    """Measures the tasks of steps that run in stock order.

    It is also the place where the weight gradients of these steps run, at once, so that each can be timed alone. No
    time of a step is left out: the forward between two layers counts for the layer that it leads to, the loss for the
    last layer, and the backward between two weight gradients as the input gradient of the layer that it leads to.

    Args:
        layers: The layers of the model, in the order of the forward.
        optimizer: The optimizer that takes the steps.
        device: The device that computes.
    """

    stream = None

    def __init__(self, layers: Sequence[Layer], optimizer: Optimizer, device: torch.device) -> None:
        self._layers = layers
        self._number = {id(layer.module): number for number, layer in enumerate(layers)}
        self._clock = DeviceClock(device)
        self._spans: list[_Spans] = [defaultdict(list)]
        self._output_bytes: dict[int, int] = {}
        self._last: Any = None
        self._last_layer = 0
        self._in_forward = False
        self._step_begin: Any = None
        self._step_depth = 0
        hooks: list[Any] = []
        for layer in layers:
            hooks.append(layer.module.register_forward_pre_hook(ModuleHook(self._entered)))
            hooks.append(layer.module.register_forward_hook(ModuleHook(self._left)))
        hooks.append(optimizer.register_step_pre_hook(self._before_step))
        hooks.append(optimizer.register_step_post_hook(self._after_step))
        self._hooks = hooks

    @property
    def steps(self) -> int:
        """Number of steps that were measured."""
        return len(self._spans) - 1

    def _record(self, kind: Kind, layer: int, begin: Any, end: Any) -> None:
        self._spans[-1][kind, layer].append((begin, end))
        self._last = end

    def _entered(self, *_: Any) -> None:
        if not self._in_forward:
            self._in_forward = True
            self._step_depth = 0  # torch calls no hook after a step that has failed
            self._last = self._clock.now()

    def _left(self, module: nn.Module, *_: Any) -> None:
        self._last_layer = self._number[id(module)]
        if self._in_forward:
            self._record(Kind.F, self._last_layer, self._last, self._clock.now())

    def backward_begins(self) -> None:
        """Note that the chain of input gradients is about to begin."""
        if self._in_forward:
            self._in_forward = False
            self._record(Kind.F, self._last_layer, self._last, self._clock.now())

    def start(self, task: Task) -> None:
        """Compute a weight gradient at once, and measure it."""
        self._in_forward = False
        begin = self._clock.now()
        task.compute()
        end = self._clock.now()
        if task.layer < len(self._layers):
            if self._last is not None:
                self._record(Kind.X, task.layer, self._last, begin)
            self._record(Kind.W, task.layer, begin, end)
            self._output_bytes[task.layer] = task.held_bytes

    def wait(self, task: Task) -> None:
        """Return at once: the task was computed when it started."""

    def _before_step(self, *_: Any) -> None:
        # An optimizer's step may call the step of its base class, which runs the hooks too: only the outermost counts.
        self._step_depth += 1
        if self._step_depth == 1:
            self._step_begin = self._clock.now()

    def _after_step(self, *_: Any) -> None:
        self._step_depth -= 1
        if self._step_depth:
            return
        self._record(Kind.U, 0, self._step_begin, self._clock.now())
        self._spans.append(defaultdict(list))
        self._last, self._in_forward = None, False

    def close(self) -> Costs:
        """Remove the hooks, and return the costs; the first step, which warms up, does not count."""
        for hook in self._hooks:
            hook.remove()
        seconds = self._seconds()
        everything = sum(layer.size for layer in self._layers)
        made = []
        for number, layer in enumerate(self._layers):
            forward, input_grad, weight_grad = (seconds.get((kind, number), 0.0) for kind in (Kind.F, Kind.X, Kind.W))
            made.append(
                LayerCost(
                    layer.name or type(layer.module).__name__,
                    forward,
                    input_grad,
                    weight_grad,
                    seconds.get((Kind.U, 0), 0.0) * layer.size / everything,
                    output_bytes=self._output_bytes.get(number, 0),
                    parameter_bytes=layer.size,
                )
            )
        return Costs(tuple(made), name="the steps watched", source="measured")

    def _seconds(self) -> dict[tuple[Kind, int], float]:
        """Return medians of each task's seconds, scaled so that their sum is the median of whole steps."""
        taken = self._spans[:-1] or self._spans
        steps = [
            {task: sum(self._clock.seconds(*span) for span in spans) for task, spans in step.items()}
            for step in taken[1:] or taken
        ]
        tasks = {
            task: median(step.get(task, 0.0) for step in steps) for task in {task for step in steps for task in step}
        }
        whole, sum_of_tasks = median(sum(step.values()) for step in steps), sum(tasks.values())
        return {task: spent * whole / sum_of_tasks for task, spent in tasks.items()} if sum_of_tasks else {}
