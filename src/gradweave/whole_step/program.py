"""A forward graph with the step that belongs to it: traced and lowered when it first runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.optim import Optimizer

from gradweave.errors import GradweaveError
from gradweave.whole_step.capture import Captured
from gradweave.whole_step.lower import Compiled, Replay, Runnable
from gradweave.whole_step.optimizer_inputs import OptimizerInputs
from gradweave.whole_step.packing import PackedCounts
from gradweave.whole_step.trace import Clipping, TracedStep, trace_step

LOSS_MARK = {"gradweave": "loss"}
"""What the operation that gives the loss is annotated with."""


@dataclass(frozen=True)
class StepOptions:
    """How steps are made.

    Attributes:
        clipping: Of gradients.
        lower: ``"inductor"`` or ``"replay"``.
        capture: Whether to replay a step on a GPU as one CUDA graph.
        report: Told what is going on while a step is made.
    """

    clipping: Clipping
    lower: str
    capture: bool
    report: Callable[[str], None]


class Program:
    """What a call of the compiled objective runs: the whole step in the forward's place.

    Args:
        forward: The objective as Dynamo captured it; weights and buffers are among its inputs.
        model: Whose weights and buffers stay where they are.
        optimizer: Whose parameters are updated.
        options: How.
    """

    def __init__(
        self, forward: GraphModule, model: nn.Module, optimizer: Optimizer, options: StepOptions
    ) -> None:
        self._forward = forward
        self._options = options
        self._model = model
        self._optimizer = optimizer
        self._loss_output = _find_loss(forward)
        self._outputs = len(_outputs(forward))
        self._made: list[tuple[list[int], TracedStep, Runnable]] = []
        self.norm: torch.Tensor | None = None

    def __call__(self, *inputs: Any) -> list[Any]:
        """Takes a step; returns what the forward would."""
        with torch.no_grad():
            runnable = self._find(inputs) or self._make(inputs)
            outputs = runnable.run(inputs)
        if len(outputs) > self._outputs:
            self.norm = outputs.pop()
        return outputs

    def _find(self, inputs: Sequence[Any]) -> Runnable | None:
        """A step that was made for these parameters and for the optimizer as it is now."""
        for trainable, traced, runnable in self._made:
            optimizer = traced.optimizer
            same = all(inputs[index] is p for index, p in zip(trainable, optimizer.params, strict=True))
            if same and optimizer.fits() and traced.holds(optimizer.numbers()) and runnable.valid():
                return runnable
        return None

    def _make(self, inputs: Sequence[Any]) -> Runnable:
        own = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        trainable = [index for index, x in enumerate(inputs) if id(x) in own and x.requires_grad]
        if not trainable:
            raise GradweaveError("the loss depends on no parameter of the optimizer that requires a gradient")
        options = self._options
        params: list[nn.Parameter] = [inputs[index] for index in trainable]
        optimizer = OptimizerInputs(self._optimizer, params)
        counts = PackedCounts(optimizer) if options.lower == "inductor" else None
        began = time.perf_counter()
        options.report("tracing the step")
        traced = trace_step(self._forward, inputs, trainable, self._loss_output, optimizer, options.clipping)
        runnable: Runnable
        if counts is None:
            runnable = Replay(traced)
        else:
            options.report(f"compiling {len(traced.graph.graph.nodes)} operations")
            runnable = compiled = Compiled(traced, counts, inputs)
            if options.capture and params[0].is_cuda:
                runnable = Captured(compiled, self._fixed(traced, inputs))
        self._made = [made for made in self._made if made[2].valid()]
        self._made.append((trainable, traced, runnable))
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
