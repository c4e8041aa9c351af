"""What each layer of a real training step costs, and what the link between ranks does."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave._runtime.ab_trial import DeviceClock
from gradweave._runtime.module_hook import ModuleHook
from gradweave.parallel.data_parallel.layers import Layer
from gradweave.reordering.queue import Task
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.links import Link
from gradweave.schedule.tasks import Kind

_Spans = defaultdict[tuple[Kind, int], list[tuple[Any, Any]]]
"""From when to when each task of a step ran."""
_SMALL, _LARGE = 1 << 10, 1 << 17
"""Elements of the messages that a link is measured with."""
_AT_ONCE = 8
_REPEATS = 5
"""How often: what delays a message now and then must not count."""
_MOST_SECONDS = 1.0
"""For messages of one size; once they are sent anyway."""
_MATRIX, _PRODUCTS = 96, 100
"""Of the computation that messages disturb: a product takes some tens of microseconds."""


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


def measure_link(group: dist.ProcessGroup | None, device: torch.device, most_bytes: int) -> Link:
    """What averaging over a group takes per message and per byte, the same on all ranks.

    Messages are under way at the same time, as those of a step are. On a CPU also what they take of the cores that
    compute: by how much a computation beside them falls behind, and what it takes to copy gradients to the message
    and averages back. Over a slow link it is done less often: what is asked for takes about as long as a step or two.

    Args:
        group: Over whose ranks.
        device: Where their tensors are.
        most_bytes: That messages which are under way together hold: no more than a step's, but for tiny models.
    """
    ranks = dist.get_world_size(group)
    large_size = max(4 * _SMALL, min(_LARGE, most_bytes // (4 * _AT_ONCE)))
    small, _ = _seconds_of_messages(group, device, _SMALL)
    large, repeats = _seconds_of_messages(group, device, large_size)
    busy = _lost_beside_messages(group, large_size * _AT_ONCE, repeats) if device.type == "cpu" else 0.0
    small, large, busy = _slowest(group, device, small, large, busy)
    per_byte = max(large - small, 1e-9) / (4 * (large_size - _SMALL))
    unit = Link(1.0, 0.0).all_reduce_seconds(1, ranks)
    depth = Link(math.inf, 1.0).all_reduce_seconds(0, ranks)
    return Link(unit / per_byte, max(small - 4 * _SMALL * per_byte, 0.0) / depth, busy)


def _slowest(group: dist.ProcessGroup | None, device: torch.device, *seconds: float) -> list[float]:
    """The largest of all ranks' numbers."""
    together = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
    return list(together.tolist())


def _seconds_of_messages(group: dist.ProcessGroup | None, device: torch.device, elements: int) -> tuple[float, int]:
    """Seconds of one message, of several that are under way together, and how often they were sent for that.

    The first time is not counted, unless it took so long that once is enough.
    """
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    messages = [torch.zeros(elements, dtype=torch.float32, device=device) for _ in range(_AT_ONCE)]

    def once() -> float:
        wait()
        began = time.perf_counter()
        for work in [dist.all_reduce(message, group=group, async_op=True) for message in messages]:
            work.wait()
        wait()
        return (time.perf_counter() - began) / _AT_ONCE

    (first,) = _slowest(group, device, once())
    repeats = min(_REPEATS, int(_MOST_SECONDS / (_AT_ONCE * first)))
    return (median(once() for _ in range(repeats)), repeats) if repeats else (first, 1)


def _lost_beside_messages(group: dist.ProcessGroup | None, elements: int, repeats: int) -> float:
    """Seconds of computation that a byte of a message costs, in whichever process or kernel that is spent."""
    matrix = torch.ones(_MATRIX, _MATRIX, dtype=torch.float32, device="cpu")

    def products(until: Callable[[int], bool]) -> tuple[int, float]:
        done, began = 0, time.perf_counter()
        while not until(done):
            torch.mm(matrix, matrix)
            done += 1
        return done, time.perf_counter() - began

    products(lambda done: done >= _PRODUCTS)
    lost = []
    for _ in range(repeats):
        gradients, message = (torch.zeros(elements, dtype=torch.float32, device="cpu") for _ in range(2))
        dist.barrier(group=group)
        alone = min(products(lambda done: done >= _PRODUCTS)[1] for _ in range(3)) / _PRODUCTS
        began = time.perf_counter()
        message.copy_(gradients)
        copying = time.perf_counter() - began
        work = dist.all_reduce(message, group=group, async_op=True)
        done, spent = products(lambda _, work=work: work.is_completed())  # type: ignore[misc]
        work.wait()
        began = time.perf_counter()
        gradients.copy_(message)
        lost.append(max(spent - done * alone, 0.0) + copying + time.perf_counter() - began)
    return median(lost) / (4 * elements)
