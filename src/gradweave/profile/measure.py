"""Seconds of every layer's forward, input gradient, weight gradient and update, on the device they run on."""

from __future__ import annotations

import copy
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.compat.eager import flat_leaves
from gradweave.errors import ArgumentError
from gradweave.profile.beside import Calls, with_shares
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.tasks import Kind
from gradweave.whole_step import compile

ROUNDS = 3
REPLAYS = 5
Progress = Callable[[str, float], None]


def measure_costs(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    batch: Sequence[Any],
    *,
    rounds: int = ROUNDS,
    progress: Progress = lambda *_: None,
) -> Costs:
    """Measures a training step task by task; model and optimizer stay as they are.

    A copy of both takes the steps, one operation after the other. On a GPU the operations of a task are
    captured and replayed, so that what is measured is their work and not their launches. The update is
    the optimizer's own, all at once, and shared out by the size of the weights. There it is also measured
    how weight gradients run beside forward and backward, by groups of layers: the shares of the device that
    tasks take (``weight_grad_demand`` and the like) come from that. On a CPU a task has all of it.

    Args:
        model: What is trained.
        loss_fn: Called as ``loss_fn(model, *batch)``.
        optimizer: Whose update is measured.
        batch: Of the size that will be trained with.
        rounds: Steps of which the median is taken.
        progress: Told what is going on, and the share that is done.
    """
    if rounds < 1:
        raise ArgumentError("rounds", rounds, "give at least 1")
    if not any(True for _ in model.parameters()):
        raise ArgumentError("model", type(model).__name__, "has no parameters: there is nothing to train")
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return _measure(model, loss_fn, optimizer, batch, device, rounds, progress)


def _measure(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    batch: Sequence[Any],
    device: torch.device,
    rounds: int,
    progress: Progress,
) -> Costs:
    model, optimizer = copy.deepcopy((model, optimizer))
    sizes = _Sizes(model)
    step = compile(model, loss_fn, optimizer, lower="replay")
    progress("warming up", 0.0)
    with sizes:
        step(*batch)
    step.record(_Timing().task)
    step(*batch)  # not captured: libraries try out their kernels, which a capture forbids
    watch: _Watch = _Replaying() if device.type == "cuda" else _Timing()
    seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for number in range(rounds):
        watch.reset()
        step.record(watch.task)
        step(*batch)
        for task, spent in watch.seconds.items():
            seconds[task].append(spent)
        progress(f"round {number + 1} of {rounds}", (number + 1) / rounds * (0.5 if device.type == "cuda" else 1.0))
    calls = Calls()
    if device.type == "cuda":
        watch.reset()
        step.record(calls.task)
        step(*batch)
    step.record(None)
    update = _time_updates(optimizer, device, rounds)
    everything = sum(sizes.of(name)[2] for name in step.recorded_layers)
    layers = []
    for number, name in enumerate(step.recorded_layers):
        forward, input_grad, weight_grad = (median(seconds[kind, number] or [0.0]) for kind in (Kind.F, Kind.X, Kind.W))
        given, made, weights = sizes.of(name)
        own = update * weights / max(everything, 1)
        named = name or type(model).__name__
        layers.append(LayerCost(named, forward, input_grad, weight_grad, own, given, made, weights))
    costs = Costs(tuple(layers), name=type(model).__name__, source="measured")
    if device.type == "cuda":
        costs = with_shares(
            costs, calls, capturable_update(optimizer), device, lambda doing, done: progress(doing, 0.5 + done / 2)
        )
        progress("done", 1.0)
    return costs


def _time_updates(optimizer: Optimizer, device: torch.device, rounds: int) -> float:
    """Seconds of the optimizer's own step, in the form it has (plain, multi-tensor or fused)."""
    for group in optimizer.param_groups:
        for p in filter(lambda p: p.requires_grad, group["params"]):
            p.grad = 1e-3 * torch.randn_like(p)
    spent = []
    for _ in range(rounds + 1):
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(REPLAYS):
            optimizer.step()
        _synchronize(device)
        spent.append((time.perf_counter() - began) / REPLAYS)
    return median(spent[1:])


def capturable_update(optimizer: Optimizer) -> Callable[[], None] | None:
    """The step of an optimizer that is a copy, in a form that a CUDA graph can hold; None where there is none.

    Fused kernels keep their step counts on the device, so that saying so is enough.
    """
    for group in optimizer.param_groups:
        if group.get("fused") and "capturable" in group:
            group["capturable"] = True
        elif not group.get("capturable") and not isinstance(optimizer, torch.optim.SGD):
            return None

    def update() -> None:
        optimizer.step()

    return update


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Watch(Protocol):
    """Sums up the seconds of each task of a step."""

    seconds: dict[tuple[Kind, int], float]

    def reset(self) -> None:
        """Begins a step."""

    def task(self, kind: Kind, layer: int) -> Any:
        """Context in which operations of a task run."""


class _Timing:
    """On the host's clock: for the CPU, which runs what it is given at once."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins a step."""
        self.seconds: dict[tuple[Kind, int], float] = defaultdict(float)

    @contextmanager
    def task(self, kind: Kind, layer: int) -> Iterator[None]:
        """Measures what runs inside."""
        began = time.perf_counter()
        yield
        self.seconds[kind, layer] += time.perf_counter() - began


class _Replaying:
    """As replays of a CUDA graph, one for each run of operations.

    The first replay does the work that a capture only records; further ones are measured. They do it
    again, which for a copy that is thrown away does no harm. Updates are measured elsewhere, and may read
    step counts on the host, which a capture does not allow.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self.reset()

    def reset(self) -> None:
        """Begins a step: its graphs share memory, and live as long as it lasts."""
        self.seconds: dict[tuple[Kind, int], float] = defaultdict(float)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def task(self, kind: Kind, layer: int) -> Iterator[None]:
        """Captures what is given inside, then runs and measures it."""
        if kind is Kind.U:
            yield
            return
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # operations that are views only
            graph.capture_begin(pool=self._pool)
            try:
                yield
            finally:
                graph.capture_end()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        self.seconds[kind, layer] += begin.elapsed_time(end) / REPLAYS / 1e3


class _Sizes:
    """Bytes of each module's input, output and parameters, from one forward."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._bytes: dict[str, tuple[int, int]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_hook(self._note(name)))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, given: Any, made: Any) -> None:
            self._bytes[name] = _bytes_of(given), _bytes_of(made)

        return note

    def of(self, name: str) -> tuple[int, int, int]:
        """Of a module's input, output and own parameters."""
        weights = _bytes_of(list(self._modules[name].parameters(recurse=False)))
        return (*self._bytes.get(name, (0, 0)), weights)


def _bytes_of(values: Any) -> int:
    tensors = [value for value in flat_leaves(values) if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
