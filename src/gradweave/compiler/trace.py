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
from torch.fx import GraphModule

from gradweave._compat.tracing import (
    DataDependentError,
    as_if_compiling,
    as_it_was,
    fake_mode,
    fake_of,
    float_symbol,
    guards_of,
    names_of,
    trace_to_graph,
)
from gradweave.compiler.host_random import refusing_drawn_numbers
from gradweave.compiler.loss_scaling import Scaling, keep_if_found
from gradweave.compiler.optimizer_inputs import OptimizerInputs
from gradweave.step_graph.errors import NotOneGraphError
from gradweave.step_graph.nodes import changed_by, phase, root
from gradweave.step_graph.objective import Objective, differentiate


@dataclass(frozen=True)
class Clipping:
    """How gradients are limited before the update: by their common norm, or one by one."""

    max_norm: float | None = None
    max_value: float | None = None


@dataclass(frozen=True)
class Recipe:
    """What a step does with the gradients.

    Attributes:
        clipping: Done before the update.
        sums: Where earlier micro-batches have summed up gradients; they are added to, and set to zero
            by an update.
        summed: Which of the trainable parameters these belong to.
        update: Whether the step updates; otherwise it only adds to the sums.
        scaling: How the loss is scaled, if it is.
        scale: The scale and its tracker, likewise.
        unguarded: State that the graph does not leave as it was when an update is skipped; who runs
            it has to, by the graph's last output.
    """

    clipping: Clipping
    sums: Sequence[torch.Tensor] = ()
    summed: tuple[int, ...] = ()
    update: bool = True
    scaling: Scaling | None = None
    scale: Sequence[torch.Tensor] = ()
    unguarded: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TracedStep:
    """A graph and what it is for.

    Attributes:
        graph: Takes the inputs of the objective, the sums and the scale, then the optimizer's state,
            then its numbers; returns the forward's outputs, the gradients' norm where there is one,
            and whether the update was skipped where it can be.
        optimizer: What the state and the numbers are.
        inputs: How many inputs come before the optimizer's.
        owners: For each input, which of the trainable parameters it is, or belongs to; None for others.
        with_gradient: Which of the trainable parameters the loss depends on.
        holds: Whether the graph is right for other numbers, such as a weight decay that was 0.
    """

    graph: GraphModule
    optimizer: OptimizerInputs
    inputs: int
    owners: tuple[int | None, ...]
    with_gradient: frozenset[int]
    can_skip: bool
    holds: Callable[[Sequence[float]], bool]

    def changed_inputs(self) -> set[int]:
        """Which of the inputs before the optimizer's the step changes in place."""
        nodes = self.graph.graph.nodes
        inputs = {node: index for index, node in enumerate(nodes) if node.op == "placeholder"}
        changed = {root(argument) for node in nodes for argument in changed_by(node)}
        return {index for node, index in inputs.items() if node in changed and index < self.inputs}


def trace_step(objective: Objective, optimizer: OptimizerInputs, recipe: Recipe, *, exact: bool = False) -> TracedStep:
    """Traces a step; no real tensor is read or changed.

    Optimizers are traced as they run eagerly; those whose eager form branches on a step count, in
    the form that torch has for capturing, where that has none.

    Args:
        objective: What is differentiated.
        optimizer: What updates.
        recipe: What is done with the gradients.
        exact: Whether the operations must be those of the eager step.
    """
    try:
        return _trace(objective, optimizer, recipe, capturable=False, exact=exact)
    except DataDependentError:
        pass
    try:
        return _trace(objective, optimizer, recipe, capturable=True, exact=exact)
    except DataDependentError as error:
        name = type(optimizer.optimizer).__name__
        raise NotOneGraphError(
            f"optimizer={name}: its step branches on a value that is known only when it runs ({_first_line(error)}); "
            "use another optimizer"
        ) from error


def _trace(
    objective: Objective, optimizer: OptimizerInputs, recipe: Recipe, *, capturable: bool, exact: bool
) -> TracedStep:
    mode = fake_mode()
    values = optimizer.exact_values() if exact else optimizer.numbers()
    symbols = [
        fake_of(mode, x) if isinstance(x, torch.Tensor) else float_symbol(mode, f"number_{index}", x)
        for index, x in enumerate(values)
    ]
    floats = [index for index, x in enumerate(values) if not isinstance(x, torch.Tensor)]
    names = names_of([symbols[index] for index in floats])
    inputs = [*objective.inputs, *recipe.sums, *recipe.scale]
    with_gradient: set[int] = set()
    first_sum, first_scale = len(objective.inputs), len(objective.inputs) + len(recipe.sums)

    places = {id(x): index for index, x in enumerate(objective.inputs)}
    same = {slot: places[id(x)] for slot, x in enumerate(optimizer.state()) if id(x) in places}

    def step(inputs: list[torch.Tensor], state: list[torch.Tensor], numbers: list[Any]) -> list[Any]:
        state = [inputs[same[slot]] if slot in same else x for slot, x in enumerate(state)]
        own, sums, scale = inputs[:first_sum], inputs[first_sum:first_scale], inputs[first_scale:]
        outputs, params, grads = differentiate(objective, own, scale)
        with_gradient.update(index for index, grad in enumerate(grads) if grad is not None)
        with phase("gradients"):
            _add_up(grads, dict(zip(recipe.summed, sums, strict=True)), keep=not recipe.update)
        outputs = [output.detach() if isinstance(output, torch.Tensor) else output for output in outputs]
        if not recipe.update:
            return outputs
        with phase("gradients"):
            found = recipe.scaling.unscale(grads, scale[0]) if recipe.scaling else None
            norm = _clip(params, grads, recipe.clipping)
        targets = [own[index] for index in objective.trainable]
        with phase("update"):
            left = [tensor for slot, tensor in enumerate(state) if slot not in recipe.unguarded]
            guarded = [*targets, *left] if recipe.scaling else []
            before = [tensor.clone() for tensor in guarded]
            optimizer.step_on(targets, grads, state, numbers, capturable=capturable)
            if found is not None:
                keep_if_found(guarded, before, found)
        if recipe.scaling and found is not None:
            recipe.scaling.advance(scale[0], scale[1], found)
        return [*outputs, *(extra for extra in (norm, found) if extra is not None)]

    with as_it_was(), refusing_drawn_numbers(), mode, as_if_compiling(capturable):
        graph = trace_to_graph(step, as_eager=exact)(
            [fake_of(mode, x) for x in inputs], [fake_of(mode, x) for x in optimizer.state()], symbols
        )
    if any(root(argument).op == "get_attr" for node in graph.graph.nodes for argument in changed_by(node)):
        raise NotOneGraphError(
            "the step changes a tensor in place that is neither a weight, a buffer, a batch nor the optimizer's state; "
            "register it as a buffer of the model"
        )
    if recipe.update and with_gradient and not _changes_a_weight(graph, objective.trainable):
        name = type(optimizer.optimizer).__name__
        raise NotOneGraphError(
            f"optimizer={name}: its step, traced on stand-ins of the weights, changes none of them, as one does that "
            "leaves the update to another optimizer; give that one"
        )
    can_skip = recipe.update and recipe.scaling is not None
    own = {position: index for index, position in enumerate(objective.trainable)}
    owners = (
        *(own.get(position) for position in range(len(objective.inputs))),
        *recipe.summed,
        *(None for _ in recipe.scale),
        *(slot.param for slot in optimizer.state_slots),
        *(None for _ in symbols),
    )
    branches = guards_of(mode, names)

    def holds(numbers: Sequence[float]) -> bool:
        return branches([numbers[index] for index in floats])

    return TracedStep(graph, optimizer, len(inputs), owners, frozenset(with_gradient), can_skip, holds)


def _changes_a_weight(graph: GraphModule, trainable: Sequence[int]) -> bool:
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    weights = {placeholders[index] for index in trainable}
    return any(root(argument) in weights for node in nodes for argument in changed_by(node))


def _add_up(grads: list[torch.Tensor | None], sums: dict[int, torch.Tensor], *, keep: bool) -> None:
    """Adds gradients to the sums; unless the sums are kept, they replace the gradients and become zero."""
    for index, total in sums.items():
        grad = grads[index]
        if keep and grad is not None:
            total.add_(grad)
        elif not keep:
            grads[index] = total.clone() if grad is None else total + grad
            total.zero_()


def _clip(params: Sequence[torch.Tensor], grads: list[torch.Tensor | None], clipping: Clipping) -> torch.Tensor | None:
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
