"""The whole step as one graph of ATen operations: forward, gradients, clipping, update.

The graph holds exactly what the eager step would run, one parameter at a time, with every hyperparameter an input.
Weights, buffers and optimizer state are inputs that it changes in place.
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
    guards_of,
    names_of,
    number_symbol,
    trace_to_graph,
)
from gradweave.compiler.gradients import Averaging, Clipping, LossScaling, accumulate, clip, restore_if_infinite
from gradweave.compiler.optimizer_inputs import OptimizerInputs
from gradweave.compiler.passes.communication import send_behind_gradients
from gradweave.compiler.python_counts import PythonCountsError, serves_other_steps, take_out_counts
from gradweave.compiler.random_numbers import refuse_python_random
from gradweave.step_graph.errors import NotOneGraphError
from gradweave.step_graph.nodes import changed_by, phase, root
from gradweave.step_graph.objective import Objective, differentiate
from gradweave.step_graph.tasks import StepTasks, module_names, tasks_of


@dataclass(frozen=True)
class Recipe:
    """The treatment of gradients in a step.

    Attributes:
        clipping: Before the update.
        sums: Gradients of earlier micro-batches; an update sets them to zero, other steps add to them.
        summed: Numbers of the trainable parameters that these belong to.
        update: Whether the step updates; otherwise it only adds to the sums.
        averaging: Over ranks, before an update; None if there are no others.
        scaling: Of the loss; None if it is not scaled.
        scale: The scale and its tracker; empty if the loss is not scaled.
        unguarded: State slots that the graph does not restore when an update is skipped; the caller must, by the
            graph's last output.
    """

    clipping: Clipping
    sums: Sequence[torch.Tensor] = ()
    summed: tuple[int, ...] = ()
    update: bool = True
    averaging: Averaging | None = None
    scaling: LossScaling | None = None
    scale: Sequence[torch.Tensor] = ()
    unguarded: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TracedStep:
    """A step's graph and the meaning of its inputs.

    Attributes:
        graph: Takes the inputs of the objective, the sums and the scale, then the optimizer's state, then its
            hyperparameters; returns the forward's outputs, the ranks' signals if there are others, the norm of the
            gradients where there is one, and whether the update was skipped where it can be.
        optimizer: The inputs that are the optimizer's.
        input_count: Number of inputs before the optimizer's.
        owners: For each input, the trainable parameter that it is, or belongs to; None for others.
        with_gradient: Numbers of the trainable parameters that the loss depends on.
        can_skip: Whether the update is skipped where a gradient is not finite.
        holds: Returns whether the graph is right for other hyperparameters: every branch that the optimizer's code
            took on them, such as on a weight decay of 0, would be taken again.
        counted: Returns what the optimizer's Python counts become; None if it has none.
    """

    graph: GraphModule
    optimizer: OptimizerInputs
    input_count: int
    owners: tuple[int | None, ...]
    with_gradient: frozenset[int]
    can_skip: bool
    holds: Callable[[Sequence[float]], bool]
    counted: Callable[[Sequence[Any]], list[Any]] | None = None

    def count(self) -> None:
        """Advance the optimizer's Python counts, after a step."""
        if self.counted is not None:
            self.optimizer.put_counts(self.counted(self.optimizer.values()))

    def changed_inputs(self) -> set[int]:
        """Return the positions of the inputs before the optimizer's that the step changes in place."""
        nodes = self.graph.graph.nodes
        inputs = {node: index for index, node in enumerate(nodes) if node.op == "placeholder"}
        changed = {root(argument) for node in nodes for argument in changed_by(node)}
        return {index for node, index in inputs.items() if node in changed and index < self.input_count}

    def tasks(self, model: nn.Module) -> StepTasks:
        """Return the task of each operation; the layers are modules of the model."""
        return tasks_of(self.graph.graph, self.owners, module_names(self.optimizer.params, model))


def trace_step(objective: Objective, optimizer: OptimizerInputs, recipe: Recipe, *, exact: bool = False) -> TracedStep:
    """Trace a step; no real tensor is read or changed.

    An optimizer is traced in the form that it runs eagerly, or, if that branches on a tensor such as a step count, in
    the form that torch has for CUDA graphs.

    Args:
        objective: What is differentiated.
        optimizer: What updates.
        recipe: What is done with the gradients.
        exact: Whether the operations must be those of the eager step.
    """
    try:
        return _trace(objective, optimizer, recipe, capturable=False, exact=exact)
    except PythonCountsError as error:
        if recipe.scaling is not None:
            raise  # the host does not know whether the update is skipped, and the count with it
        optimizer.take_counts([*optimizer.count_places, *error.places])
        return trace_step(objective, optimizer, recipe, exact=exact)
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
        fake_of(mode, x) if isinstance(x, torch.Tensor) else number_symbol(mode, f"number_{index}", x)
        for index, x in enumerate(values)
    ]
    floats = [index for index, x in enumerate(values) if not isinstance(x, torch.Tensor)]
    names = names_of([symbols[index] for index in floats])
    inputs = [*objective.inputs, *recipe.sums, *recipe.scale]
    with_gradient: set[int] = set()
    first_sum, first_scale = len(objective.inputs), len(objective.inputs) + len(recipe.sums)

    # State may be an input of the forward, too. Two fakes of one tensor would be two tensors to the tracer, and writes
    # to one would not be seen in the other.
    position = {id(x): index for index, x in enumerate(objective.inputs)}
    same = {slot: position[id(x)] for slot, x in enumerate(optimizer.state()) if id(x) in position}

    def step(inputs: list[torch.Tensor], state: list[torch.Tensor], numbers: list[Any]) -> list[Any]:
        state = [inputs[same[slot]] if slot in same else x for slot, x in enumerate(state)]
        own, sums, scale = inputs[:first_sum], inputs[first_sum:first_scale], inputs[first_scale:]
        outputs, params, grads = differentiate(objective, own, scale)
        with_gradient.update(index for index, grad in enumerate(grads) if grad is not None)
        with phase("gradients"):
            accumulate(grads, dict(zip(recipe.summed, sums, strict=True)), update=recipe.update)
        outputs = [output.detach() if isinstance(output, torch.Tensor) else output for output in outputs]
        if not recipe.update:
            return outputs
        signals = None
        if recipe.averaging is not None:
            with phase("communication"):
                signals = recipe.averaging.average(grads)
        with phase("gradients"):
            found_inf = recipe.scaling.unscale(grads, scale[0]) if recipe.scaling else None
            norm = clip(params, grads, recipe.clipping)
        targets = [own[index] for index in objective.trainable]
        with phase("update"):
            guarded_state = [tensor for slot, tensor in enumerate(state) if slot not in recipe.unguarded]
            guarded = [*targets, *guarded_state] if recipe.scaling else []
            before = [tensor.clone() for tensor in guarded]
            counts = optimizer.step_on(targets, grads, state, numbers, capturable=capturable)
            if found_inf is not None:
                restore_if_infinite(guarded, before, found_inf)
        if recipe.scaling and found_inf is not None:
            recipe.scaling.advance(scale[0], scale[1], found_inf)
        return [*outputs, *(extra for extra in (signals, norm, found_inf) if extra is not None), *counts]

    with as_it_was(), refuse_python_random(), mode, as_if_compiling(capturable):
        graph = trace_to_graph(step, as_eager=exact)(
            [fake_of(mode, x) for x in inputs], [fake_of(mode, x) for x in optimizer.state()], symbols
        )
    if not recipe.update:
        optimizer.forget_settings()
    places = optimizer.count_places if recipe.update else []
    counted = take_out_counts(graph, len(places), len(symbols)) if places else None
    if recipe.averaging is not None:
        send_behind_gradients(graph.graph)
        graph.recompile()
    if any(root(argument).op == "get_attr" for node in graph.graph.nodes for argument in changed_by(node)):
        raise NotOneGraphError(
            "the step changes a tensor in place that is neither a weight, a buffer, a batch nor the optimizer's state; "
            "register it as a buffer of the model"
        )
    if recipe.update and with_gradient and not _changes_a_weight(graph, objective.trainable):
        name = type(optimizer.optimizer).__name__
        raise NotOneGraphError(
            f"optimizer={name}: its step, traced on stand-ins of the weights, changes none of them, as that of a "
            "wrapper around another optimizer; give the wrapped one"
        )
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

    if counted is not None:
        last = optimizer.numbers()
        if not serves_other_steps(holds, lambda numbers: optimizer.with_counts(numbers, counted(numbers)), last):
            name = type(optimizer.optimizer).__name__
            raise NotOneGraphError(
                f"optimizer={name}: its step needs the value of a count that it keeps in Python; compute with it as "
                "Python's operators, math.sqrt and math.pow do"
            )
    can_skip = recipe.update and recipe.scaling is not None
    return TracedStep(graph, optimizer, len(inputs), owners, frozenset(with_gradient), can_skip, holds, counted)


def _changes_a_weight(graph: GraphModule, trainable: Sequence[int]) -> bool:
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    weights = {placeholders[index] for index in trainable}
    return any(root(argument) in weights for node in nodes for argument in changed_by(node))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
