"""The whole step as one graph of ATen operations: forward, gradients, clipping, update.

The graph holds exactly what the eager step would run, one parameter at a time, with every
hyperparameter an input. Weights, buffers and optimizer state are inputs that it changes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from gradweave.compat import (
    DataDependentBranch,
    as_if_compiling,
    fake_mode,
    fake_of,
    float_symbol,
    guards_of,
    trace_to_graph,
)
from gradweave.errors import GradweaveError
from gradweave.whole_step.optimizer_inputs import OptimizerInputs


@dataclass(frozen=True)
class Clipping:
    """How gradients are limited before the update: by their common norm, or one by one."""

    max_norm: float | None = None
    max_value: float | None = None


@dataclass(frozen=True)
class TracedStep:
    """A graph and what it is for.

    Attributes:
        graph: Takes the forward's inputs, then the optimizer's state, then its numbers; returns the
            forward's outputs and, where there is one, the gradients' norm.
        optimizer: What the state and the numbers are.
        forward_inputs: How many inputs come first.
        holds: Whether the graph is right for other numbers, such as a weight decay that was 0.
    """

    graph: GraphModule
    optimizer: OptimizerInputs
    forward_inputs: int
    holds: Callable[[Sequence[float]], bool]

    def changed_inputs(self) -> set[int]:
        """Which of the forward's inputs the step changes in place."""
        nodes = self.graph.graph.nodes
        inputs = {node: index for index, node in enumerate(nodes) if node.op == "placeholder"}
        changed = {root(node) for node in nodes if is_mutable(node)}
        return {index for node, index in inputs.items() if node in changed and index < self.forward_inputs}


def is_mutable(node: Any) -> bool:
    """Whether a node changes its first argument."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def root(node: Any) -> Any:
    """What an in-place operation's result is another name of."""
    while isinstance(node, Node) and is_mutable(node):
        node = node.args[0]
    return node


def trace_step(
    forward: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    trainable: Sequence[int],
    loss_output: int,
    optimizer: OptimizerInputs,
    clipping: Clipping,
) -> TracedStep:
    """Traces a step; no real tensor is read or changed.

    Args:
        forward: Takes the inputs and returns a sequence of outputs.
        inputs: Weights, buffers and batch.
        trainable: Which of the inputs are parameters to update, as ``optimizer.params`` has them.
        loss_output: Which of the outputs is to be differentiated.
        optimizer: The update.
        clipping: What is done to gradients before it.
    """
    try:
        return _trace(forward, inputs, trainable, loss_output, optimizer, clipping, capturable=False)
    except DataDependentBranch:
        pass
    try:
        return _trace(forward, inputs, trainable, loss_output, optimizer, clipping, capturable=True)
    except DataDependentBranch as error:
        name = type(optimizer.optimizer).__name__
        raise GradweaveError(
            f"optimizer={name}: its step branches on a value that is known only when it runs ({_first_line(error)}); "
            "use another optimizer, or fuse() with the loop of your own"
        ) from error


def _trace(
    forward: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    trainable: Sequence[int],
    loss_output: int,
    optimizer: OptimizerInputs,
    clipping: Clipping,
    *,
    capturable: bool,
) -> TracedStep:
    mode = fake_mode()
    numbers = optimizer.numbers()
    symbols = [float_symbol(mode, f"number_{index}", value) for index, value in enumerate(numbers)]

    def step(inputs: list[torch.Tensor], state: list[torch.Tensor], numbers: list[Any]) -> list[Any]:
        leaves = list(inputs)
        for index in trainable:
            leaves[index] = inputs[index].detach().requires_grad_()
        with torch.enable_grad():
            outputs = list(forward(*leaves))
            loss = outputs[loss_output]
            params = [leaves[index] for index in trainable]
            grads = list(torch.autograd.grad(loss, params, allow_unused=True))
        norm = _clip(params, grads, clipping)
        targets = [inputs[index] for index in trainable]
        optimizer.step_on(targets, grads, state, numbers, capturable=capturable)
        outputs = [output.detach() if isinstance(output, torch.Tensor) else output for output in outputs]
        return [*outputs, norm] if norm is not None else outputs

    with mode, as_if_compiling(capturable):
        graph = trace_to_graph(step)(
            [fake_of(mode, x) for x in inputs], [fake_of(mode, x) for x in optimizer.state()], symbols
        )
    return TracedStep(graph, optimizer, len(inputs), guards_of(mode, symbols))


def _clip(
    params: Sequence[torch.Tensor], grads: list[torch.Tensor | None], clipping: Clipping
) -> torch.Tensor | None:
    """Clips gradients as torch's utilities do; returns their norm before that, if it was computed."""
    if clipping.max_norm is None and clipping.max_value is None:
        return None
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    norm = None
    if clipping.max_norm is not None:
        norm = nn.utils.clip_grad_norm_(params, clipping.max_norm, foreach=False)
    if clipping.max_value is not None:
        nn.utils.clip_grad_value_(params, clipping.max_value, foreach=False)
    for p in params:
        p.grad = None
    return norm


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
