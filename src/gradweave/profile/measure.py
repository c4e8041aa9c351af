"""Seconds of every layer's forward, input gradient, weight gradient and update, on the device they run on."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.functions import flat_leaves
from gradweave._compat.modules import hooks_suspended
from gradweave._logging import announce
from gradweave._runtime.dry_run import random_numbers_kept
from gradweave._runtime.requirements import refuse_sharded, refuse_wrapped, require_module
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.profile.captured import TaskCalls, captured_seconds
from gradweave.profile.operations import Operations, differentiate_eagerly
from gradweave.profile.overlap import scale_to, with_measured_shares
from gradweave.profile.recorded import record_operations
from gradweave.profile.traced import trace_operations
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.tasks import Kind
from gradweave.step_graph.objective import on_device_of

ROUNDS = 3
_UPDATES = 5
"""Updates in a row, so that launching them is not what is measured."""
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
    """Measure a training step task by task; model and optimizer stay as they are.

    A copy of both runs forward and backward; their operations are recorded, and repeated one after the other. A step
    that does more than operations of torch's, such as kernels of its own, is traced as :func:`~gradweave.compile`
    traces it, which takes longer. The update is the optimizer's own, all at once, and shared out by the size of the
    weights.

    On a GPU the operations of each task are kept, captured and replayed, so that what is measured is their work and not
    their launches; everything that a step computes is in memory at once meanwhile. Groups of layers are also measured
    side by side, weight gradients with forward and backward: the shares of the device that tasks take
    (``weight_grad_demand`` and the like) come from that. Where forward and backward can be captured as they are, costs
    are scaled to what that takes. On a CPU a task has all of the device.

    With ``torch.backends.cudnn.benchmark``, cuDNN tries out its kernels in the first step of a process, here as in
    training, which may take longer than all the rest.

    Args:
        model: The model to train.
        loss_fn: Called as ``loss_fn(model, *batch)``.
        optimizer: Whose update is measured.
        batch: Of the size to train with.
        rounds: Steps of which the median is taken, at least 1; on a GPU one is enough.
        progress: Told what is going on, and the share that is done.

    Returns:
        The costs of every layer.
    """
    if rounds < 1:
        raise ArgumentError("rounds", rounds, "give at least 1")
    if not any(True for _ in model.parameters()):
        raise UnsupportedError(type(model).__name__, "it has no parameters: there is nothing to train")
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
    with hooks_suspended(model):  # the user's hooks see the user's steps, and nothing else
        model, optimizer = copy.deepcopy((model, optimizer))
    sizes = _ModuleSizes(model)
    require_module(model)
    refuse_wrapped(model)
    refuse_sharded(model)
    batch = copy.deepcopy(on_device_of(model, batch))
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    progress("warming up", 0.0)
    with sizes:
        differentiate_eagerly(model, loss_fn, params, batch)
    operations = _operations(model, loss_fn, params, batch)
    calls = TaskCalls()
    if device.type == "cuda":
        operations.run(calls.keep)
        seconds = calls.seconds(device, lambda done: progress("tasks alone", done / 2))
    else:
        seconds = _time_tasks(operations, rounds, progress)
    layers = _layer_costs(operations.layers, seconds, _time_update(optimizer, device, rounds), sizes, model)
    costs = Costs(layers, name=type(model).__name__, source="measured")
    if device.type == "cuda":
        update = capturable_update(optimizer)
        costs = with_measured_shares(costs, calls, update, device, lambda doing, done: progress(doing, 0.5 + done / 2))
        del calls, operations  # their memory: all activations
        costs = scale_to(costs, captured_seconds(partial(_forward_and_backward, model, loss_fn, batch), device))
        progress("done", 1.0)
    return costs


def _operations(
    model: nn.Module, loss_fn: Callable[..., Any], params: Sequence[nn.Parameter], batch: Sequence[Any]
) -> Operations:
    """Return the operations of a step as recorded, or as traced where they cannot all be recorded and repeated."""
    try:
        operations = record_operations(model, loss_fn, params, batch)
        operations.run(lambda *_: nullcontext())
        return operations
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any, of the user's code and of torch's under a dispatch mode
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        announce(f"measure_costs: the step is traced, which takes longer: {why}")
    try:
        return trace_operations(model, loss_fn, params, batch)
    except (GradweaveError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any, of torch's tracers
        first = str(error).strip().partition("\n")[0]
        raise UnsupportedError(
            "a step that is measured", f"it can be neither recorded ({why}) nor traced ({first})", "simplify loss_fn"
        ) from error


def _layer_costs(
    names: Sequence[str],
    seconds: dict[tuple[Kind, int], float],
    update: float,
    sizes: _ModuleSizes,
    model: nn.Module,
) -> tuple[LayerCost, ...]:
    """Return the costs of all layers, with a share of the update by the size of their weights."""
    all_weights = sum(sizes.of(name)[2] for name in names)
    layers = []
    for number, name in enumerate(names):
        forward, input_grad, weight_grad = (seconds.get((kind, number), 0.0) for kind in (Kind.F, Kind.X, Kind.W))
        inputs, outputs, weights = sizes.of(name)
        own_update = update * weights / max(all_weights, 1)
        shown = name or type(model).__name__
        layers.append(LayerCost(shown, forward, input_grad, weight_grad, own_update, inputs, outputs, weights))
    return tuple(layers)


def _forward_and_backward(model: nn.Module, loss_fn: Callable[..., Any], batch: Sequence[Any]) -> None:
    """Run forward and backward as an eager loop does."""
    model.zero_grad()
    loss = loss_fn(model, *batch)
    (loss[0] if isinstance(loss, tuple) else loss).backward()


def _time_tasks(operations: Operations, rounds: int, progress: Progress) -> dict[tuple[Kind, int], float]:
    """Return the seconds of each task on a CPU: medians of some rounds, after one that is not counted."""
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        clock = _HostClock()
        operations.run(clock.time)
        for task, spent in clock.seconds.items() if number else ():
            found[task].append(spent)
        progress(f"round {number} of {rounds}", number / rounds)
    return {task: median(spent) for task, spent in found.items()}


def _time_update(optimizer: Optimizer, device: torch.device, rounds: int) -> float:
    """Return the seconds of the optimizer's own step, in the form it has (plain, multi-tensor or fused)."""
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
    """Return the step of an optimizer in a form that a CUDA graph can hold, and change its settings to that.

    Fused kernels keep their step counts on the device, so that setting ``capturable`` is enough.

    Args:
        optimizer: A copy, for measuring only.

    Returns:
        The step; None where there is no such form.
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


class _HostClock:
    """Seconds of each task by the host's clock: for a CPU, whose operations run when they are called."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[Kind, int], float] = defaultdict(float)

    @contextmanager
    def time(self, kind: Kind, layer: int) -> Iterator[None]:
        """Add the time of what runs inside to a task."""
        began = time.perf_counter()
        yield
        self.seconds[kind, layer] += time.perf_counter() - began


class _ModuleSizes:
    """Bytes of each module's input, output and parameters, from one forward inside of this context."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._bytes: dict[str, tuple[int, int]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_hook(self._hook(name)))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(_: nn.Module, inputs: Any, outputs: Any) -> None:
            self._bytes[name] = _bytes_of(inputs), _bytes_of(outputs)

        return record

    def of(self, name: str) -> tuple[int, int, int]:
        """Return the bytes of a module's input, output and own parameters."""
        weights = _bytes_of(list(self._modules[name].parameters(recurse=False)))
        return (*self._bytes.get(name, (0, 0)), weights)


def _bytes_of(values: Any) -> int:
    tensors = [value for value in flat_leaves(values) if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
