"""A forward graph with the step that belongs to it: traced and lowered when it first runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.fx import GraphModule
from torch.optim import Optimizer

from gradweave.errors import GradweaveError
from gradweave.fusion.buckets import same_objects
from gradweave.whole_step.capture import Captured
from gradweave.whole_step.lower import Compiled, Replay, Runnable
from gradweave.whole_step.optimizer_inputs import OptimizerInputs
from gradweave.whole_step.packing import SharedState
from gradweave.whole_step.recompute import with_recomputation
from gradweave.whole_step.scaling import Scaling, scaler_inputs
from gradweave.whole_step.trace import Clipping, Objective, Recipe, TracedStep, trace_step

LOSS_MARK = {"gradweave": "loss"}
"""What the operation that gives the loss is annotated with."""


@dataclass(frozen=True)
class StepOptions:
    """How steps are made.

    Attributes:
        clipping: Of gradients.
        lower: ``"inductor"`` or ``"replay"``.
        scaler: That scales the loss, if any does.
        memory_budget: Share of the activations to keep; None for all that are not checkpointed.
        capture: Whether to replay a step on a GPU as one CUDA graph.
        report: Told what is going on while a step is made.
    """

    clipping: Clipping
    lower: str
    scaler: GradScaler | None
    memory_budget: float | None
    capture: bool
    report: Callable[[str], None]


@dataclass(frozen=True)
class _Made:
    """A step that can be taken, and what it was made for."""

    update: bool
    trainable: tuple[int, ...]
    traced: TracedStep
    runnable: Runnable


class Program:
    """What a call of the compiled objective runs: the whole step in the forward's place.

    Args:
        forward: The objective as Dynamo captured it; weights and buffers are among its inputs.
        model: Whose weights and buffers stay where they are.
        optimizer: Whose parameters are updated.
        shared: What this program has in common with those of other shapes.
        options: How.
    """

    def __init__(
        self, forward: GraphModule, model: nn.Module, optimizer: Optimizer, shared: SharedState, options: StepOptions
    ) -> None:
        self._forward = forward
        self._options = options
        self._model = model
        self._optimizer = optimizer
        self._shared = shared
        self._loss_output = _find_loss(forward)
        self._outputs = len(_outputs(forward))
        self._made: list[_Made] = []

    def close(self) -> None:
        """Lets go of everything: Dynamo keeps a program for good."""
        self.__dict__.clear()

    def run(self, *inputs: Any) -> list[Any]:
        """Takes a step, or sums up gradients for the one that does; returns what the forward would."""
        update = self._shared.update
        own = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        trainable = tuple(index for index, x in enumerate(inputs) if id(x) in own and x.requires_grad)
        if not trainable:
            raise GradweaveError("the loss depends on no parameter of the optimizer that requires a gradient")
        params = [inputs[index] for index in trainable]
        sums: list[torch.Tensor] = []
        if not update or any(p.grad is not None for p in params):
            sums = self._shared.sums_for(params)
        every = [*inputs, *sums, *scaler_inputs(self._options.scaler)]
        with torch.no_grad():
            runnable = self._find(trainable, params, len(every), update) or self._make(trainable, inputs, sums, update)
            outputs = runnable.run(every)
        if sums:
            self._shared.show_sums(params, visible=not update)
        if update:
            self._shared.norm = outputs.pop() if len(outputs) > self._outputs else None
        return outputs

    def _find(
        self, trainable: tuple[int, ...], params: Sequence[nn.Parameter], inputs: int, update: bool
    ) -> Runnable | None:
        """A step that was made for these parameters and for the optimizer as it is now."""
        for made in self._made:
            optimizer = made.traced.optimizer
            same = (made.update, made.trainable, made.traced.inputs) == (update, trainable, inputs)
            fits = same and same_objects(params, optimizer.params) and optimizer.fits()
            if fits and made.traced.holds(optimizer.numbers()) and made.runnable.valid():
                return made.runnable
        return None

    def _make(
        self, trainable: tuple[int, ...], inputs: Sequence[Any], sums: Sequence[torch.Tensor], update: bool
    ) -> Runnable:
        options = self._options
        optimizer = OptimizerInputs(self._optimizer, [inputs[index] for index in trainable])
        began = time.perf_counter()
        options.report("tracing the step")
        scaler = options.scaler
        scaling, scale = (Scaling.of(scaler) if scaler else None), scaler_inputs(scaler)
        every = [*inputs, *sums, *scale]
        compiles = options.lower == "inductor"
        if compiles:
            self._shared.counts(optimizer.params)
        forward = with_recomputation(self._forward, inputs, trainable, options.memory_budget)
        objective = Objective(forward, inputs, trainable, self._loss_output)
        traced = trace_step(
            objective, optimizer, Recipe(options.clipping, sums, update, scaling, scale, skips_counts=not compiles)
        )
        runnable: Runnable
        if not compiles:
            runnable = Replay(traced)
        else:
            options.report(f"compiling {len(traced.graph.graph.nodes)} operations")
            runnable = compiled = Compiled(traced, self._shared, every)
            if options.capture and optimizer.params[0].is_cuda:
                runnable = Captured(compiled, self._fixed(traced, every))
        self._made = [made for made in self._made if made.runnable.valid()]
        self._made.append(_Made(update, trainable, traced, runnable))
        options.report(f"ready after {time.perf_counter() - began:.1f} s")
        return runnable

    def _fixed(self, traced: TracedStep, inputs: Sequence[Any]) -> list[int]:
        """The inputs that are the model's own, or changed in place: they must be used where they are."""
        own = {id(x) for x in (*self._model.parameters(), *self._model.buffers())}
        changed = traced.changed_inputs()
        return [index for index, x in enumerate(inputs) if id(x) in own or index in changed]


def _outputs(forward: GraphModule) -> Sequence[Any]:
    outputs: Sequence[Any] = next(node for node in forward.graph.nodes if node.op == "output").args[0]
    return outputs


def _find_loss(forward: GraphModule) -> int:
    """Which output was marked as the loss."""
    for index, node in enumerate(_outputs(forward)):
        if (node.meta.get("custom") or {}).get("gradweave") == "loss":
            return index
    raise GradweaveError("loss_fn returned something that does not depend on the model; return the loss first")
