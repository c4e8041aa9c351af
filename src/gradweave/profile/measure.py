"""Seconds of every layer's forward, input gradient, weight gradient and update, on the device they run on."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.eager import flat_leaves, hooks_suspended
from gradweave._logging import announce
from gradweave._runtime.dry_run import random_numbers_kept
from gradweave.compiler.api import compile, placed
from gradweave.compiler.checks import check_step
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.profile.operations import differentiate, record_operations
from gradweave.profile.overlap import Calls, captured_seconds, scale_to, with_shares
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.tasks import Kind
from gradweave.step_graph.recording import Mark

ROUNDS = 3
_UPDATES = 5
"""In a row, so that launching them is not what is measured."""
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

    A copy of both runs forward and backward; their operations are noted, and done again one after the other. A step
    that does more than operations of torch's, such as kernels of its own, is traced as :func:`~gradweave.compile`
    traces it, which takes longer. On a GPU the operations of each task are kept, captured and replayed, so that what is
    measured is their work and not their launches: everything that a step computes is in memory at once meanwhile. The
    update is the optimizer's own, all at once, and shared out by the size of the weights. There it is also measured how
    weight gradients run beside forward and backward, by groups of layers: the shares of the device that tasks take
    (``weight_grad_demand`` and the like) come from that. On a CPU a task has all of it. Where forward and backward can
    be captured as they are, costs are scaled to what that takes.

    With ``torch.backends.cudnn.benchmark``, cuDNN tries out its kernels in the first step of a process, here as in
    training, which may take longer than all the rest.

    Args:
        model: What is trained.
        loss_fn: Called as ``loss_fn(model, *batch)``.
        optimizer: Whose update is measured.
        batch: Of the size that will be trained with.
        rounds: Steps of which the median is taken; on a GPU one does.
        progress: Told what is going on, and the share that is done.
    """
    if rounds < 1:
        raise ArgumentError("rounds", rounds, "give at least 1")
    if not any(True for _ in model.parameters()):
        raise ArgumentError("model", type(model).__name__, "has no parameters: there is nothing to train")
    if not torch.is_grad_enabled():
        raise GradweaveError("measure_costs() under no_grad() or inference_mode(): training needs gradients; leave it")
    device = next(model.parameters()).device
    with random_numbers_kept(device):
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
    with hooks_suspended(model):  # those of the user see what the user runs, and nothing else
        model, optimizer = copy.deepcopy((model, optimizer))
    sizes = _Sizes(model)
    check_step(model, _no_update(optimizer))
    batch = copy.deepcopy(placed(batch, model))
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    progress("warming up", 0.0)
    with sizes:
        differentiate(model, loss_fn, params, batch)
    operations = _operations(model, loss_fn, optimizer, params, batch)
    calls = Calls()
    if device.type == "cuda":
        operations.run(calls.task)
        seconds = calls.seconds(device, lambda done: progress("tasks alone", done / 2))
    else:
        seconds = _time_steps(operations, rounds, progress)
    update = _time_updates(optimizer, device, rounds)
    everything = sum(sizes.of(name)[2] for name in operations.layers)
    layers = []
    for number, name in enumerate(operations.layers):
        forward, input_grad, weight_grad = (seconds.get((kind, number), 0.0) for kind in (Kind.F, Kind.X, Kind.W))
        given, made, weights = sizes.of(name)
        own = update * weights / max(everything, 1)
        named = name or type(model).__name__
        layers.append(LayerCost(named, forward, input_grad, weight_grad, own, given, made, weights))
    costs = Costs(tuple(layers), name=type(model).__name__, source="measured")
    if device.type == "cuda":
        costs = with_shares(
            costs, calls, capturable_update(optimizer), device, lambda doing, done: progress(doing, 0.5 + done / 2)
        )
        del calls, operations
        costs = scale_to(costs, captured_seconds(partial(_stock, model, loss_fn, batch), device))
        progress("done", 1.0)
    return costs


class _TaskByTask(Protocol):
    """Forward and backward that can be run with a context for each task."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of its layers' modules, once it has run."""

    def run(self, mark: Mark) -> None:
        """Does everything once."""


def _operations(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    params: Sequence[nn.Parameter],
    batch: Sequence[Any],
) -> _TaskByTask:
    """What a step does, as it is seen to run; or as it is traced, where not all of it can be seen and done again."""
    try:
        operations = record_operations(model, loss_fn, params, batch)
        operations.run(lambda *_: nullcontext())
        return operations
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # who looks on meets whatever others do with torch's modes
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        announce(f"measure_costs: the step is traced, which takes longer: {why}")
    return _Traced(model, loss_fn, optimizer, batch)


class _Traced:
    """A step as :func:`compile` traces it, of a batch."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any], optimizer: Optimizer, batch: Sequence[Any]
    ) -> None:
        self._step = compile(model, loss_fn, _no_update(optimizer), lower="replay")
        self._batch = batch
        self._step(*batch)

    @property
    def layers(self) -> tuple[str, ...]:
        return self._step.recorded_layers

    def run(self, mark: Mark) -> None:
        self._step.record(mark)
        self._step(*self._batch)


def _no_update(optimizer: Optimizer) -> Optimizer:
    """Trains the same parameters and leaves them as they are: tracing a real update takes as long as all the rest."""
    return torch.optim.SGD([p for group in optimizer.param_groups for p in group["params"]], lr=0.0, foreach=True)


def _stock(model: nn.Module, loss_fn: Callable[..., Any], batch: Sequence[Any]) -> None:
    """Forward and backward as a loop has them."""
    model.zero_grad()
    loss = loss_fn(model, *batch)
    (loss[0] if isinstance(loss, tuple) else loss).backward()


def _time_steps(operations: _TaskByTask, rounds: int, progress: Progress) -> dict[tuple[Kind, int], float]:
    """Seconds of each task: medians of some steps, behind one that is not counted."""
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        timing = _Timing()
        operations.run(timing.task)
        for task, spent in timing.seconds.items() if number else ():
            found[task].append(spent)
        progress(f"round {number} of {rounds}", number / rounds)
    return {task: median(spent) for task, spent in found.items()}


def _time_updates(optimizer: Optimizer, device: torch.device, rounds: int) -> float:
    """Seconds of the optimizer's own step, in the form it has (plain, multi-tensor or fused)."""
    for group in optimizer.param_groups:
        for p in filter(lambda p: p.requires_grad, group["params"]):
            p.grad = 1e-3 * torch.randn_like(p)
    spent = []
    for _ in range(rounds + 1):
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(_UPDATES):
            optimizer.step()
        _synchronize(device)
        spent.append((time.perf_counter() - began) / _UPDATES)
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


class _Timing:
    """Sums up the seconds of each task on the host's clock: for the CPU, which runs what it is given at once."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[Kind, int], float] = defaultdict(float)

    @contextmanager
    def task(self, kind: Kind, layer: int) -> Iterator[None]:
        """Measures what runs inside."""
        began = time.perf_counter()
        yield
        self.seconds[kind, layer] += time.perf_counter() - began


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
