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
"""From when to when each task of a step ran."""


class StepWatch:
    """Measures the tasks of steps that run in stock order: also the place where their weight gradients run.

    Nothing of a step is left out: forward between two layers counts as that of the layer that it leads to, the loss as
    that of the last layer, and backward between two weight gradients as the input gradient of the layer that it leads
    to.
    """

    stream = None

    def __init__(self, layers: Sequence[Layer], optimizer: Optimizer, device: torch.device) -> None:
        self._layers = layers
        self._number = {id(layer.module): number for number, layer in enumerate(layers)}
        self._moments = DeviceClock(device)
        self._spans: list[_Spans] = [defaultdict(list)]
        self._held: dict[int, int] = {}
        self._last: Any = None
        self._last_layer = 0
        self._in_forward = False
        self._step_begun: Any = None
        self._in_steps = 0
        hooks: list[Any] = []
        for layer in layers:
            hooks.append(layer.module.register_forward_pre_hook(ModuleHook(self._entered)))
            hooks.append(layer.module.register_forward_hook(ModuleHook(self._left)))
        hooks.append(optimizer.register_step_pre_hook(self._before_step))
        hooks.append(optimizer.register_step_post_hook(self._behind_step))
        self._hooks = hooks

    @property
    def steps(self) -> int:
        """How many have been taken."""
        return len(self._spans) - 1

    def _note(self, kind: Kind, layer: int, begin: Any, end: Any) -> None:
        self._spans[-1][kind, layer].append((begin, end))
        self._last = end

    def _entered(self, *_: Any) -> None:
        if not self._in_forward:
            self._in_forward = True
            self._in_steps = 0
            self._last = self._moments.now()

    def _left(self, module: nn.Module, *_: Any) -> None:
        self._last_layer = self._number[id(module)]
        if self._in_forward:
            self._note(Kind.F, self._last_layer, self._last, self._moments.now())

    def backward_begins(self) -> None:
        """The chain of input gradients is about to begin."""
        if self._in_forward:
            self._in_forward = False
            self._note(Kind.F, self._last_layer, self._last, self._moments.now())

    def start(self, task: Task) -> None:
        """Computes a weight gradient at once, and notes when."""
        self._in_forward = False
        begin = self._moments.now()
        task.compute()
        end = self._moments.now()
        if task.layer < len(self._layers):
            if self._last is not None:
                self._note(Kind.X, task.layer, self._last, begin)
            self._note(Kind.W, task.layer, begin, end)
            self._held[task.layer] = task.held

    def wait(self, task: Task) -> None:
        """It was computed at once."""

    def _before_step(self, *_: Any) -> None:
        """Also called for the step of a base class inside of an optimizer's own."""
        self._in_steps += 1
        if self._in_steps == 1:
            self._step_begun = self._moments.now()

    def _behind_step(self, *_: Any) -> None:
        self._in_steps -= 1
        if self._in_steps:
            return
        self._note(Kind.U, 0, self._step_begun, self._moments.now())
        self._spans.append(defaultdict(list))
        self._last, self._in_forward = None, False

    def close(self) -> Costs:
        """Ends the measurement; the first step is not counted."""
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
                    output_bytes=self._held.get(number, 0),
                    parameter_bytes=layer.size,
                )
            )
        return Costs(tuple(made), name="the steps watched", source="measured")

    def _seconds(self) -> dict[tuple[Kind, int], float]:
        """Of each task of a step: medians, which sum up to the median of whole steps."""
        taken = self._spans[:-1] or self._spans
        steps = [
            {task: sum(self._moments.seconds(*span) for span in spans) for task, spans in step.items()}
            for step in taken[1:] or taken
        ]
        tasks = {
            task: median(step.get(task, 0.0) for step in steps) for task in {task for step in steps for task in step}
        }
        whole, apart = median(sum(step.values()) for step in steps), sum(tasks.values())
        return {task: spent * whole / apart for task, spent in tasks.items()} if apart else {}
