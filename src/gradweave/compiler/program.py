"""A forward graph with the step that belongs to it: traced and lowered when it first runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.fx import Graph, GraphModule
from torch.optim import Optimizer

from gradweave._compat.eager import gradient_hooks
from gradweave._compat.tracing import TooManyVariantsError, compile_lock
from gradweave._logging import announce
from gradweave._runtime.buckets import mark_written, same_objects
from gradweave.compiler.cuda_graph import Captured
from gradweave.compiler.host_random import set_torch_numbers, torch_numbers, torch_numbers_kept
from gradweave.compiler.loss_scaling import Scaling, scaler_inputs
from gradweave.compiler.lower import Compiled, Replay, Runnable, run_marked
from gradweave.compiler.optimizer_inputs import OptimizerInputs
from gradweave.compiler.padding import fillings_of
from gradweave.compiler.passes.placement import has_data_dependent_sizes
from gradweave.compiler.passes.scalars import moved_slots
from gradweave.compiler.passes.two_streams import note_places, upper_layers
from gradweave.compiler.shared_memory import Sharing, contents_of, groups_of
from gradweave.compiler.shared_state import SharedState
from gradweave.compiler.trace import Clipping, Recipe, TracedStep, trace_step
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.schedule.costs import Costs
from gradweave.step_graph.errors import HookError, NoStateError, NotOneGraphError, RefusedError
from gradweave.step_graph.objective import Objective, loss_output_of, outputs_of
from gradweave.step_graph.recompute import is_checkpointed, with_recomputation
from gradweave.step_graph.tasks import StepTasks, module_names, split_convolution_backward, tasks_of


@dataclass(frozen=True)
class StepOptions:
    """How steps are made.

    Attributes:
        clipping: Of gradients.
        lower: ``"inductor"`` or ``"replay"``.
        scaler: That scales the loss, if any does.
        memory_budget: Share of the activations to keep; None for what ``torch.compile`` would keep.
        costs: By which a second stream is planned, if one is to be.
        capture: Whether to replay a step on a GPU as one CUDA graph.
        report: Told what is going on while a step is made.
    """

    clipping: Clipping
    lower: str
    scaler: GradScaler | None
    memory_budget: float | None
    costs: Costs | None
    capture: bool
    report: Callable[[str], None]


@dataclass(frozen=True)
class _Purpose:
    """What a step is made for, besides the optimizer's state.

    Attributes:
        trainable: Which inputs of the forward are updated.
        repeated: Which are the same tensor as an earlier one, and which that is: a weight may have come to be used in
            two places since the forward was captured.
        summed: Which of these have a sum of gradients already.
        update: Whether there is an update, or more summing up.
        scaling: How the loss is scaled.
        lower: How it is lowered; a step that is recorded is always replayed.
    """

    trainable: tuple[int, ...]
    repeated: tuple[tuple[int, int], ...]
    summed: tuple[int, ...]
    update: bool
    scaling: Scaling | None
    lower: str


@dataclass(frozen=True)
class _Made:
    """A step that can be taken, and what it was made for.

    Attributes:
        own: Which inputs are the model's parameters and buffers.
        memory: Which of these share memory.
    """

    purpose: _Purpose
    model: nn.Module
    traced: TracedStep
    runnable: Runnable
    own: tuple[int, ...]
    memory: Sharing

    @cached_property
    def tasks(self) -> StepTasks:
        """What each operation is for; asked for when a step is recorded."""
        return traced_tasks(self.traced, self.model)


_MOST_KEPT = 16
"""Steps that a program keeps; each time the optimizer's settings change, there is one more."""

_MOST_MADE = 4 * _MOST_KEPT
"""Steps that it makes: what changes so often is not worth more graphs."""


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
        self._loss_output = loss_output_of(forward)
        self._outputs = len(outputs_of(forward))
        self._made: list[_Made] = []
        self._times_made = 0
        self._proven: set[int] = set()

    def close(self) -> None:
        """Lets go of everything: Dynamo keeps a program for good."""
        self.__dict__.clear()

    def run(self, *inputs: Any) -> list[Any]:
        """Takes a step, or sums up gradients for the one that does; returns what the forward would."""
        shared, scaler = self._shared, self._options.scaler
        every = [p for group in self._optimizer.param_groups for p in group["params"]]
        own = set(map(id, every))
        repeated = _repeated(inputs)
        again = {index for index, _ in repeated}
        trainable = tuple(
            index for index, x in enumerate(inputs) if id(x) in own and x.requires_grad and index not in again
        )
        if not trainable:
            raise RefusedError("the loss depends on no parameter of the optimizer that requires a gradient")
        params = [inputs[index] for index in trainable]
        if shared.fillings is None:
            shared.fillings = fillings_of(self._forward, inputs, shared.batch)
        _refuse_hooks(params)
        known = set(map(id, params))
        strays = any(p.grad is not None and id(p) not in known for p in every)
        shared.finish_eagerly = shared.update and strays
        update = shared.update and not strays
        summed = tuple(index for index, p in enumerate(params) if not update or p.grad is not None)
        lower = self._options.lower if shared.mark is None else "replay"
        purpose = _Purpose(trainable, repeated, summed, update, Scaling.of(scaler) if scaler else None, lower)
        sums = shared.sums_for([params[index] for index in summed])
        with torch.no_grad():
            made = self._find(purpose, params, inputs)
            if made is None:
                with compile_lock(), torch_numbers_kept(params[0].device):
                    made = self._make(purpose, inputs, sums)
            given = [*inputs, *sums, *scaler_inputs(scaler)]
            if shared.mark is None:
                made, outputs = self._taken(made, given, inputs, sums)
            else:
                shared.begun = True
                _hurry(made)
                outputs = run_marked(made.traced, given, made.tasks, shared.mark)
                mark_written(params)
                shared.layers = made.tasks.layers
        if not update:
            shared.show_sums([params[index] for index in made.traced.with_gradient])
            return outputs
        for index in summed:
            params[index].grad = None
        shared.norm = outputs.pop() if len(outputs) > self._outputs else None
        return outputs

    def _taken(
        self, made: _Made, given: Sequence[Any], inputs: Sequence[Any], sums: Sequence[torch.Tensor]
    ) -> tuple[_Made, list[Any]]:
        """Takes a step. One that fails the first time, and has changed nothing yet, is lowered in the other way."""
        if id(made) in self._proven:
            self._shared.begun = True
            return made, made.runnable.run(given)
        tensors = [x for x in (*given, *made.traced.optimizer.state()) if isinstance(x, torch.Tensor)]
        before = contents_of(tensors)
        device = made.traced.optimizer.params[0].device
        numbers = torch_numbers(device)
        try:
            outputs = made.runnable.run(given)
        except torch.OutOfMemoryError:
            self._shared.begun = True
            raise
        except Exception as error:  # torch's kernels raise whatever they are
            if contents_of(tensors) != before:
                self._shared.begun = True
                raise
            set_torch_numbers(device, numbers)
            self._made.remove(made)
            if isinstance(made.runnable, Replay):
                raise NotOneGraphError(f"its graph fails: {type(error).__name__}: {error}") from error
            with compile_lock(), torch_numbers_kept(device):
                made = self._made_instead(made.purpose, inputs, sums, error)
            return self._taken(made, given, inputs, sums)
        self._shared.begun = True
        if not has_data_dependent_sizes(made.traced.graph):
            self._proven.add(id(made))
            _hurry(made)
        return made, outputs

    def _find(self, purpose: _Purpose, params: Sequence[nn.Parameter], inputs: Sequence[Any]) -> _Made | None:
        """A step that was made for this purpose and for the optimizer as it is now."""
        for made in self._made:
            optimizer = made.traced.optimizer
            fits = made.purpose == purpose and same_objects(params, optimizer.params) and optimizer.fits()
            fits = fits and made.memory.same([inputs[index] for index in made.own])
            if fits and made.traced.holds(optimizer.numbers()) and made.runnable.valid():
                return made
        return None

    def _make(self, purpose: _Purpose, inputs: Sequence[Any], sums: Sequence[torch.Tensor]) -> _Made:
        options = self._options
        if self._times_made == _MOST_MADE:
            raise TooManyVariantsError("the optimizer's settings or attributes change too often")
        self._times_made += 1
        began = time.perf_counter()
        options.report("tracing the step")
        try:
            return self._kept(purpose, inputs, *self._made_as(purpose, inputs, sums, purpose.lower), began)
        except (ArgumentError, RefusedError, NoStateError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # Inductor raises whatever its code runs into
            if purpose.lower == "replay":
                raise
            return self._made_instead(purpose, inputs, sums, error)

    def _made_instead(
        self, purpose: _Purpose, inputs: Sequence[Any], sums: Sequence[torch.Tensor], error: Exception
    ) -> _Made:
        """A step that Inductor cannot make, or whose kernels fail, operation by operation."""
        began = time.perf_counter()
        self._shared.release_counts()
        made = self._kept(purpose, inputs, *self._made_as(purpose, inputs, sums, "replay"), began)
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        announce(
            f'compile: Inductor cannot compile this step, it runs as with lower="replay": {why}', level=logging.WARNING
        )
        return made

    def _kept(
        self, purpose: _Purpose, inputs: Sequence[Any], traced: TracedStep, runnable: Runnable, began: float
    ) -> _Made:
        models = {id(x) for x in (*self._model.parameters(), *self._model.buffers())}
        own = tuple(index for index, x in enumerate(inputs) if id(x) in models)
        memory = Sharing([inputs[index] for index in own])
        made = _Made(purpose, self._model, traced, runnable, own, memory)
        kept = [one for one in self._made if one.runnable.lasting()]
        self._made = [*kept[1 - _MOST_KEPT :], made]
        self._proven &= set(map(id, self._made[:-1]))
        self._options.report(f"ready after {time.perf_counter() - began:.1f} s")
        return made

    def _made_as(
        self, purpose: _Purpose, inputs: Sequence[Any], sums: Sequence[torch.Tensor], lower: str
    ) -> tuple[TracedStep, Runnable]:
        options, trainable = self._options, purpose.trainable
        optimizer = OptimizerInputs(self._optimizer, [inputs[index] for index in trainable])
        scale = scaler_inputs(options.scaler)
        recipe = Recipe(options.clipping, sums, purpose.summed, purpose.update, purpose.scaling, scale)
        exact = lower == "replay"

        def lowered(forward: Callable[..., Any]) -> tuple[TracedStep, Runnable]:
            objective = Objective(forward, inputs, trainable, self._loss_output)
            return self._lowered(objective, optimizer, recipe, [*inputs, *sums, *scale], exact=exact)

        return self._with_recomputation(purpose, inputs, lowered, exact=exact)

    def _with_recomputation(
        self,
        purpose: _Purpose,
        inputs: Sequence[Any],
        lowered: Callable[[Callable[..., Any]], tuple[TracedStep, Runnable]],
        *,
        exact: bool,
    ) -> tuple[TracedStep, Runnable]:
        """Lowers the step with a backward that computes activations anew, or without where torch cannot do it."""
        recorded = purpose.lower != self._options.lower
        budget = None if recorded else self._options.memory_budget
        forward = _merged(self._forward, purpose.repeated)
        try:
            return lowered(
                with_recomputation(forward, inputs, purpose.trainable, self._loss_output, budget, exact=exact)
            )
        except (GradweaveError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # torch's partitioner raises whatever it runs into
            if budget is not None:
                raise RefusedError(
                    f"memory_budget={budget}: torch cannot compute the activations of this model anew, "
                    f"give None or 1, or use torch.utils.checkpoint: {error}"
                ) from error
            if is_checkpointed(forward):
                raise NotOneGraphError(
                    "what torch.utils.checkpoint marks cannot be compiled, maybe because of random numbers in it; use "
                    f'lower="replay", or memory_budget instead of it: {error}'
                ) from error
            announce(f"compile: all activations are kept, torch cannot compute them anew: {type(error).__name__}")
            return lowered(forward)

    def _lowered(
        self, objective: Objective, optimizer: OptimizerInputs, recipe: Recipe, inputs: Sequence[Any], *, exact: bool
    ) -> tuple[TracedStep, Runnable]:
        options = self._options
        if exact:
            traced = trace_step(objective, optimizer, recipe, exact=True)
            written = [*inputs, *(x for x in optimizer.state() if x.dim() > 0)]
            return traced, Replay(traced, in_order=_share_memory(written, self._shared.batch))
        counts = self._shared.counts(optimizer.params)
        optimizer = OptimizerInputs(self._optimizer, optimizer.params)
        if recipe.update and recipe.scaling:
            trial = trace_step(objective, optimizer, replace(recipe, scaling=None))
            recipe = replace(recipe, unguarded=moved_slots(trial, counts.classes(optimizer)))
        traced = trace_step(objective, optimizer, recipe)
        options.report(f"compiling {len(traced.graph.graph.nodes)} operations")
        upper = None if options.costs is None or not recipe.update else self._plan(traced, options.costs)
        compiled = Compiled(traced, self._shared, inputs, upper=upper)
        if options.capture and optimizer.params[0].is_cuda:
            changed = traced.changed_inputs()
            return traced, Captured(compiled, self._fixed(changed, inputs), changed)
        return traced, compiled

    def _plan(self, traced: TracedStep, costs: Costs) -> int | None:
        """The layer from which on a second stream takes over; notes what each operation is for."""
        split_convolution_backward(traced.graph.graph)
        traced.graph.recompile()
        tasks = traced_tasks(traced, self._model)
        note_places(tasks.places)
        upper = upper_layers(costs, tasks.layers, traced.optimizer.params[0].device)
        what = "one stream, a second would not pay" if upper is None else f"a second stream from layer {upper} on"
        self._options.report(what)
        return upper

    def _fixed(self, changed: Collection[int], inputs: Sequence[Any]) -> list[int]:
        """The inputs that are the model's own, or changed in place: they must be used where they are."""
        own = {id(x) for x in (*self._model.parameters(), *self._model.buffers())}
        return [index for index, x in enumerate(inputs) if id(x) in own or index in changed]


def _repeated(inputs: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Which inputs are the same tensor as an earlier one, and which that is."""
    first: dict[int, int] = {}
    return tuple(
        (index, first[id(x)])
        for index, x in enumerate(inputs)
        if isinstance(x, torch.Tensor) and first.setdefault(id(x), index) != index
    )


def _merged(forward: GraphModule, repeated: Sequence[tuple[int, int]]) -> GraphModule:
    """A forward that reads a tensor that is given twice in one place."""
    if not repeated:
        return forward
    graph = Graph()
    graph.output(graph.graph_copy(forward.graph, {}))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for index, earlier in repeated:
        inputs[index].replace_all_uses_with(inputs[earlier])
    return GraphModule(forward, graph)


def _hurry(made: _Made) -> None:
    """Until it has run, a replayed step keeps updates behind all that may fail: if it does, it has changed nothing."""
    if isinstance(made.runnable, Replay):
        made.runnable.hurry()


def _share_memory(inputs: Sequence[Any], batch: Sequence[Any]) -> bool:
    """Whether weights, buffers or state share memory; tensors of a batch may, among themselves."""
    passing = set(map(id, batch))
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return any(any(id(tensors[index]) not in passing for index, _ in group) for group in groups_of(tensors))


def _refuse_hooks(params: Sequence[nn.Parameter]) -> None:
    for p in params:
        if gradient_hooks(p):
            raise HookError(f"a parameter of shape {tuple(p.shape)} has a gradient hook; remove it")


def traced_tasks(traced: TracedStep, model: nn.Module) -> StepTasks:
    """Return the tasks of a traced step."""
    return tasks_of(traced.graph.graph, traced.owners, module_names(traced.optimizer.params, model))
