"""What each layer of a real training step costs, and what the link between ranks does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave.data_parallel.layers import Layer
from gradweave.fusion.hooks import ModuleHook
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.links import Link
from gradweave.split.queue import Task

_SMALL, _LARGE = 1 << 10, 1 << 20
"""Elements of the messages that a link is measured with."""
_SMALL_REPEATS, _LARGE_REPEATS = 20, 6
"""How often: what delays a message now and then must not count, and small ones are soon sent."""


class _Moments:
    """Points in time of a device: the host's clock, or events of a GPU that are read later."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        if not self._cuda:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class StepWatch:
    """Measures the tasks of steps that run in stock order: also the place where their weight gradients run.

    Backward between two weight gradients counts as the input gradient of the layer that it leads to.
    """

    stream = None

    def __init__(self, layers: Sequence[Layer], optimizer: Optimizer, device: torch.device) -> None:
        self._layers = layers
        self._number = {id(layer.module): number for number, layer in enumerate(layers)}
        self._moments = _Moments(device)
        self._open: dict[int, Any] = {}
        self._forward: dict[int, list[tuple[Any, Any]]] = {n: [] for n in range(len(layers))}
        self._input: dict[int, list[tuple[Any, Any]]] = {n: [] for n in range(len(layers))}
        self._weight: dict[int, list[tuple[Any, Any]]] = {n: [] for n in range(len(layers))}
        self._held: dict[int, int] = {}
        self._update: list[tuple[Any, Any]] = []
        self._last: Any = None
        self._step_begun: Any = None
        self.steps = 0
        hooks: list[Any] = []
        for layer in layers:
            hooks.append(layer.module.register_forward_pre_hook(ModuleHook(self._entered)))
            hooks.append(layer.module.register_forward_hook(ModuleHook(self._left)))
        hooks.append(optimizer.register_step_pre_hook(self._before_step))
        hooks.append(optimizer.register_step_post_hook(self._behind_step))
        self._hooks = hooks

    def _entered(self, module: nn.Module, *_: Any) -> None:
        self._open[self._number[id(module)]] = self._moments.now()

    def _left(self, module: nn.Module, *_: Any) -> None:
        number = self._number[id(module)]
        if number in self._open:
            self._forward[number].append((self._open.pop(number), self._moments.now()))

    def backward_begins(self) -> None:
        """The chain of input gradients is about to begin."""
        self._last = self._moments.now()

    def start(self, task: Task) -> None:
        """Computes a weight gradient at once, and notes when."""
        begin = self._moments.now()
        task.compute()
        end = self._moments.now()
        number = task.layer
        if number < len(self._layers):
            if self._last is not None:
                self._input[number].append((self._last, begin))
            self._weight[number].append((begin, end))
            self._held[number] = task.held
        self._last = end

    def wait(self, task: Task) -> None:
        """It was computed at once."""

    def _before_step(self, *_: Any) -> None:
        self._step_begun = self._moments.now()

    def _behind_step(self, *_: Any) -> None:
        self._update.append((self._step_begun, self._moments.now()))
        self.steps += 1

    def close(self) -> Costs:
        """Ends the measurement; the first step is not counted."""
        for hook in self._hooks:
            hook.remove()
        everything = sum(layer.size for layer in self._layers)
        update = self._median(self._update)
        made = []
        for number, layer in enumerate(self._layers):
            made.append(
                LayerCost(
                    layer.name or type(layer.module).__name__,
                    self._median(self._forward[number]),
                    self._median(self._input[number]),
                    self._median(self._weight[number]),
                    update * layer.size / everything,
                    output_bytes=self._held.get(number, 0),
                    parameter_bytes=layer.size,
                )
            )
        return Costs(tuple(made), name="the steps watched", source="measured")

    def _median(self, spans: Sequence[tuple[Any, Any]]) -> float:
        spent = [self._moments.seconds(begin, end) for begin, end in spans]
        return median(spent[1:] or spent) if spent else 0.0


def measure_link(group: dist.ProcessGroup | None, device: torch.device) -> Link:
    """What averaging over a group takes per message and per byte, the same on all ranks.

    On a CPU also what it takes of the cores that compute: to send, receive and sum up, and to copy gradients to the
    message and averages back.
    """
    ranks = dist.get_world_size(group)
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def seconds(elements: int, repeats: int) -> tuple[float, float]:
        gradients, message = torch.zeros(elements, device=device), torch.zeros(elements, device=device)
        spent, of_cores = [], []
        for _ in range(repeats + 1):
            busy = time.process_time()
            message.copy_(gradients)
            wait()
            began = time.perf_counter()
            dist.all_reduce(message, group=group)
            wait()
            spent.append(time.perf_counter() - began)
            gradients.copy_(message.div_(ranks))
            of_cores.append(time.process_time() - busy)
        return median(spent[1:]), sum(of_cores[1:]) / repeats

    (small, small_busy), (large, large_busy) = seconds(_SMALL, _SMALL_REPEATS), seconds(_LARGE, _LARGE_REPEATS)
    busy = large_busy - small_busy if device.type == "cpu" else 0.0
    times = torch.tensor([small, large, busy], dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    small, large, busy = times.tolist()
    size = 4 * (_LARGE - _SMALL)
    per_byte = max(large - small, 1e-9) / size
    unit = Link(1.0, 0.0).all_reduce_seconds(1, ranks)
    depth = Link(math.inf, 1.0).all_reduce_seconds(0, ranks)
    return Link(unit / per_byte, max(small - 4 * _SMALL * per_byte, 0.0) / depth, max(busy, 0.0) / size)
