"""A captured forward with the steps that belong to it: traced and lowered when they first run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.fx import GraphModule
from torch.optim import Optimizer

from gradweave._compat.autograd import gradient_hooks
from gradweave._compat.tracing import TooManyVariantsError, compile_lock
from gradweave._logging import announce
from gradweave._runtime.buckets import mark_written, same_objects
from gradweave.compiler.aliasing import Aliasing, checksums, has_aliases, merge_inputs, repeated_inputs
from gradweave.compiler.checks import Lowering
from gradweave.compiler.cuda_graph import Captured
from gradweave.compiler.gradients import Averaging, Clipping, LossScaling, scaler_inputs
from gradweave.compiler.lower import Compiled, Replay, Runnable, replay_by_task
from gradweave.compiler.optimizer_inputs import OptimizerInputs
from gradweave.compiler.padding import padding_values
from gradweave.compiler.passes.placement import has_data_dependent_sizes
from gradweave.compiler.passes.scalars import moved_slots
from gradweave.compiler.passes.slots import SlottedStep, note_places, noted_places, slot_operations, unsupported
from gradweave.compiler.planning import StepPolicy, costs_of_layers, schedule_for, schedule_for_ranks
from gradweave.compiler.random_numbers import generator_states, preserve_generators, restore_generators
from gradweave.compiler.replica_group import ReplicaGroup
from gradweave.compiler.step_state import CallState, StepState
from gradweave.compiler.trace import Recipe, TracedStep, trace_step
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.schedule.calls import StepCall, step_call
from gradweave.step_graph.errors import (
    HookError,
    NoStateError,
    NotOneGraphError,
    PartialGradientsError,
    RefusedError,
)
from gradweave.step_graph.objective import Objective, loss_output_of, outputs_of
from gradweave.step_graph.recompute import is_checkpointed, with_recomputation
from gradweave.step_graph.recording import Mark
from gradweave.step_graph.tasks import StepTasks, module_names, split_convolution_backward

_MOST_KEPT = 16
"""Variants that a program keeps; each time the optimizer's settings change, there is one more."""

_MOST_MADE = 4 * _MOST_KEPT
"""Variants that a program makes: settings that change so often are not worth more graphs."""


@dataclass(frozen=True)
class StepOptions:
    """Options of :func:`gradweave.compile` that steps are made with.

    Attributes:
        clipping: Of gradients.
        lower: As for ``compile``.
        scaler: Of the loss; None if it is not scaled.
        memory_budget: Share of the activations to keep; None for what ``torch.compile`` would keep.
        policy: As for ``compile``.
        capture: Whether to replay a step on a GPU as one CUDA graph.
        report: Told what is going on while a step is made.
        replicas: The ranks that gradients are averaged over; None if there are no others.
    """

    clipping: Clipping
    lower: Lowering
    scaler: GradScaler | None
    memory_budget: float | None
    policy: StepPolicy
    capture: bool
    report: Callable[[str], None]
    replicas: ReplicaGroup | None = None


@dataclass(frozen=True)
class _Purpose:
    """All that a variant is made for, besides the optimizer's state.

    Attributes:
        trainable: Positions of the forward's inputs that are updated.
        repeated: Inputs that are the same tensor as an earlier one, with that: a weight may have come to be used in two
            places since the forward was captured.
        summed: Numbers of the trainable parameters that have gradients of earlier micro-batches.
        update: Whether the step updates, or adds up gradients.
        averaging: Over ranks; None if there are no others, or the step does not update.
        scaling: Of the loss; None if it is not scaled.
        lower: As for ``compile``; a step that is recorded is always replayed.
    """

    trainable: tuple[int, ...]
    repeated: tuple[tuple[int, int], ...]
    summed: tuple[int, ...]
    update: bool
    averaging: Averaging | None
    scaling: LossScaling | None
    lower: Lowering


class VariantState(Enum):
    """State of a variant.

    A variant begins on TRIAL: its kernels may fail on the first inputs they meet. A run on trial compares checksums of
    all that it may write, so that after an error it is known whether anything has changed; if not, the step can be
    taken in another way. It becomes PROVEN by a run without error, and runs without checksums from then on. A variant
    whose results have sizes that depend on values stays on TRIAL: each step may be the first of its sizes.
    """

    TRIAL = auto()
    PROVEN = auto()


@dataclass(eq=False)
class _Variant:
    """A step that can be taken, and what it was made for.

    Attributes:
        purpose: The purpose.
        model: Whose modules are the layers.
        traced: The graph.
        runnable: The graph as it runs.
        own: Positions of the inputs that are the model's parameters and buffers.
        aliasing: Of these.
        state: Whether it has run.
    """

    purpose: _Purpose
    model: nn.Module
    traced: TracedStep
    runnable: Runnable
    own: tuple[int, ...]
    aliasing: Aliasing
    state: VariantState = field(default=VariantState.TRIAL)

    @cached_property
    def tasks(self) -> StepTasks:
        """The task of each operation, for a step that is recorded."""
        return self.traced.tasks(self.model)

    @cached_property
    def _own(self) -> frozenset[int]:
        return frozenset(self.own)

    def would_change_its_batch(self, inputs: Sequence[Any]) -> bool:
        """Return whether updates may come before what is traced before them, and a batch has come to be of weights."""
        if not isinstance(self.runnable, Replay) or self.runnable.keeps_order:
            return False
        return self.aliasing.meets([x for index, x in enumerate(inputs) if index not in self._own])

    def prove(self) -> None:
        """Become PROVEN after a run without error, if sizes allow it; a replay no longer needs to hold updates back."""
        if not has_data_dependent_sizes(self.traced.graph):
            self.state = VariantState.PROVEN
            self.update_early()

    def update_early(self) -> None:
        """Let a replay update before the end of backward."""
        if isinstance(self.runnable, Replay):
            self.runnable.update_early()


class Program:
    """What a call of the captured objective runs: the whole step in the place of the forward.

    Dynamo guards what it sees: shapes, modules, the user's Python state. It does not see the optimizer, gradients that
    are there already, memory that tensors share, or the scaler's settings. So a program has a variant for each
    combination of those, and finds the one that fits before each step.

    Args:
        forward: The objective as Dynamo captured it; weights and buffers are among its inputs.
        model: Whose weights and buffers stay where they are.
        optimizer: Whose parameters are updated.
        state: Of the step that this is a graph of.
        options: Of the step.
    """

    def __init__(
        self, forward: GraphModule, model: nn.Module, optimizer: Optimizer, state: StepState, options: StepOptions
    ) -> None:
        self._forward = forward
        self._options = options
        self._model = model
        self._optimizer = optimizer
        self._state = state
        self._loss_output = loss_output_of(forward)
        self._output_count = len(outputs_of(forward))
        self._variants: list[_Variant] = []
        self._times_made = 0
        self._partial: set[tuple[tuple[int, ...], int]] = set()
        """Trainable inputs of steps whose gradients are not those of the messages of that number."""

    def run(self, *inputs: Any) -> list[Any]:
        """Take a step, or add up gradients for the one that updates; return the outputs of the forward."""
        state, scaler = self._state, self._options.scaler
        every = [p for group in self._optimizer.param_groups for p in group["params"]]
        purpose, has_strays = self._purpose_of(inputs, every)
        params = [inputs[index] for index in purpose.trainable]
        if state.padding_values is None:
            state.padding_values = padding_values(self._forward, inputs, state.batch)
        _refuse_hooks(params)
        with torch.no_grad():
            variant = self._find(purpose, params, inputs)
            if state.left is not None:
                # What is left may still read the sums, which are about to be filled for this step.
                goes_on = variant is not None and not purpose.summed and state.mark is None
                state.left.flush_unless_of(variant.runnable if goes_on else None)  # type: ignore[union-attr]
            sums = state.sums_for([params[index] for index in purpose.summed])
            if variant is None:
                try:
                    with compile_lock(), preserve_generators(params[0].device):
                        variant = self._make(purpose, inputs, sums)
                except PartialGradientsError:
                    self._partial.add((purpose.trainable, self._plan_number()))
                    return self.run(*inputs)
            given = [*inputs, *sums, *scaler_inputs(scaler)]
            if state.mark is None:
                variant, outputs = self._take(variant, given, inputs, sums)
            else:
                outputs = self._record(variant, given, state.mark)
        if not purpose.update:
            state.show_sums([params[index] for index in variant.traced.with_gradient])
            state.call = CallState.UPDATE_LEFT if has_strays else CallState.ACCUMULATED
            return outputs
        variant.traced.count()
        for index in purpose.summed:
            params[index].grad = None
        extras = outputs[self._output_count :]
        del outputs[self._output_count :]
        state.signals = extras.pop(0) if purpose.averaging is not None else None
        state.norm = extras.pop() if extras else None
        state.call = CallState.UPDATED
        return outputs

    def _purpose_of(self, inputs: Sequence[Any], every: Sequence[nn.Parameter]) -> tuple[_Purpose, bool]:
        """Return what a step on these inputs is for, and whether other parameters have gradients to update with."""
        state, scaler = self._state, self._options.scaler
        own = set(map(id, every))
        repeated = repeated_inputs(inputs)
        again = {index for index, _ in repeated}
        trainable = tuple(
            index for index, x in enumerate(inputs) if id(x) in own and x.requires_grad and index not in again
        )
        if not trainable:
            reason = "the loss depends on no parameter of the optimizer that requires a gradient"
            # Where there are other ranks, they may have gradients that this one has to average with them.
            raise RefusedError(reason) if self._options.replicas is None else NotOneGraphError(reason)
        params = [inputs[index] for index in trainable]
        known = set(map(id, params))
        has_strays = state.update and any(p.grad is not None and id(p) not in known for p in every)
        averaging = None
        if state.update and not has_strays and self._options.replicas is not None:
            averaging = self._averaging(self._options.replicas, trainable, params)
            has_strays = averaging is None
        update = state.update and not has_strays
        summed = tuple(index for index, p in enumerate(params) if not update or p.grad is not None)
        scaling = LossScaling.of(scaler) if scaler else None
        lower: Lowering = self._options.lower if state.mark is None else "replay"
        return _Purpose(trainable, repeated, summed, update, averaging, scaling, lower), has_strays

    def _plan_number(self) -> int:
        return 0 if self._options.replicas is None else self._options.replicas.plan_number

    def _averaging(
        self, replicas: ReplicaGroup, trainable: tuple[int, ...], params: Sequence[nn.Parameter]
    ) -> Averaging | None:
        """Return the averaging of a step's gradients; None if others may send gradients that this step lacks.

        Whether they do is known only when their messages are here, and a graph has no branches: such a step adds up
        gradients, and the update follows eagerly.
        """
        numbers = {p: number for number, p in enumerate(params)}
        planned = [p for message in replicas.messages for p in message]
        is_partial = (trainable, replicas.plan_number) in self._partial or any(p not in numbers for p in planned)
        if replicas.updates_apart or is_partial:
            return None
        messages = tuple(tuple(numbers[p] for p in message) for message in replicas.messages)
        return Averaging(replicas.name, replicas.share, messages, replicas.dtype)

    def _find(self, purpose: _Purpose, params: Sequence[nn.Parameter], inputs: Sequence[Any]) -> _Variant | None:
        """Return the variant for a purpose and for the optimizer as it is now; None if there is none."""
        for variant in self._variants:
            optimizer = variant.traced.optimizer
            fits = variant.purpose == purpose and same_objects(params, optimizer.params) and optimizer.fits()
            fits = fits and variant.aliasing.holds_for([inputs[index] for index in variant.own])
            fits = fits and not variant.would_change_its_batch(inputs)
            if fits and variant.traced.holds(optimizer.numbers()) and variant.runnable.fits():
                return variant
        return None

    def _record(self, variant: _Variant, given: Sequence[Any], mark: Mark) -> list[Any]:
        """Take a step one operation at a time; its variant is a replay."""
        state = self._state
        state.call = CallState.BEGUN
        variant.update_early()
        outputs = replay_by_task(variant.traced, given, variant.tasks, mark)
        mark_written(variant.traced.optimizer.params)
        state.layers = variant.tasks.layers
        return outputs

    def _take(
        self, variant: _Variant, given: Sequence[Any], inputs: Sequence[Any], sums: Sequence[torch.Tensor]
    ) -> tuple[_Variant, list[Any]]:
        """Take a step; return the variant that took it, which is another one if the first failed on trial."""
        state = self._state
        if variant.state is VariantState.PROVEN:
            state.call = CallState.BEGUN
            return variant, self._run(variant, given)
        if variant.purpose.averaging is not None:
            # What has failed here may have sent messages, which others have counted: it cannot be taken in another way.
            state.call = CallState.BEGUN
            outputs = variant.runnable.run(given)
            variant.prove()
            return variant, outputs
        tensors = [x for x in (*given, *variant.traced.optimizer.state()) if isinstance(x, torch.Tensor)]
        before = checksums(tensors)
        device = variant.traced.optimizer.params[0].device
        generators = generator_states(device)
        try:
            outputs = variant.runnable.run(given)
        except torch.OutOfMemoryError:
            state.call = CallState.BEGUN
            raise
        except Exception as error:  # any, of torch's kernels and of the user's
            if checksums(tensors) != before:
                state.call = CallState.BEGUN
                raise
            restore_generators(device, generators)
            self._variants.remove(variant)
            if isinstance(variant.runnable, Replay):
                raise NotOneGraphError(f"its graph fails: {type(error).__name__}: {error}") from error
            with compile_lock(), preserve_generators(device):
                variant = self._make_replay(variant.purpose, inputs, sums, error)
            return self._take(variant, given, inputs, sums)
        state.call = CallState.BEGUN
        variant.prove()
        return variant, outputs

    def _run(self, variant: _Variant, given: Sequence[Any]) -> list[Any]:
        """Run a proven variant, and keep hold of what it leaves to the next step."""
        state, runnable = self._state, variant.runnable
        state.schedule = runnable.schedule
        clock = state.clock
        try:
            return runnable.run(given) if clock is None else runnable.run_measured(given, clock)
        finally:
            if state.left is not None:
                state.left.hold(runnable, variant.traced.optimizer.params)

    def _make(self, purpose: _Purpose, inputs: Sequence[Any], sums: Sequence[torch.Tensor]) -> _Variant:
        if self._times_made == _MOST_MADE:
            raise TooManyVariantsError("the optimizer's settings or attributes change too often")
        self._times_made += 1
        began = time.perf_counter()
        self._options.report("tracing the step")
        try:
            return self._keep(purpose, inputs, *self._lower_as(purpose.lower, purpose, inputs, sums), began)
        except (ArgumentError, UnsupportedError, RefusedError, NoStateError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any, of Inductor
            if purpose.lower == "replay":
                raise
            return self._make_replay(purpose, inputs, sums, error)

    def _make_replay(
        self, purpose: _Purpose, inputs: Sequence[Any], sums: Sequence[torch.Tensor], error: Exception
    ) -> _Variant:
        """Make a replay of a step that Inductor cannot compile, or whose kernels fail."""
        began = time.perf_counter()
        self._state.release_counts()
        variant = self._keep(purpose, inputs, *self._lower_as("replay", purpose, inputs, sums), began)
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        announce(
            f'compile: Inductor cannot compile this step, it runs as with lower="replay": {why}', level=logging.WARNING
        )
        return variant

    def _keep(
        self, purpose: _Purpose, inputs: Sequence[Any], traced: TracedStep, runnable: Runnable, began: float
    ) -> _Variant:
        """Keep a new variant, in the place of those that cannot fit again, and of the oldest if there are too many."""
        of_model = {id(x) for x in (*self._model.parameters(), *self._model.buffers())}
        own = tuple(index for index, x in enumerate(inputs) if id(x) in of_model)
        aliasing = Aliasing([inputs[index] for index in own])
        variant = _Variant(purpose, self._model, traced, runnable, own, aliasing)
        kept = [one for one in self._variants if one.runnable.may_fit_again()]
        self._variants = [*kept[1 - _MOST_KEPT :], variant]
        self._options.report(f"ready after {time.perf_counter() - began:.1f} s")
        return variant

    def _lower_as(
        self, lower: Lowering, purpose: _Purpose, inputs: Sequence[Any], sums: Sequence[torch.Tensor]
    ) -> tuple[TracedStep, Runnable]:
        options, trainable = self._options, purpose.trainable
        optimizer = OptimizerInputs(self._optimizer, [inputs[index] for index in trainable])
        scale = scaler_inputs(options.scaler)
        averaging = purpose.averaging
        if averaging is not None and lower != options.lower:
            averaging = replace(averaging, updates_otherwise=True)
        recipe = Recipe(options.clipping, sums, purpose.summed, purpose.update, averaging, purpose.scaling, scale)
        exact = lower == "replay"

        def lower_forward(forward: Callable[..., Any]) -> tuple[TracedStep, Runnable]:
            objective = Objective(forward, inputs, trainable, self._loss_output)
            if exact:
                return self._replay(objective, optimizer, recipe)
            return self._compile(objective, optimizer, recipe, [*inputs, *sums, *scale])

        return self._lower_with_recomputation(purpose, inputs, lower_forward, exact=exact)

    def _lower_with_recomputation(
        self,
        purpose: _Purpose,
        inputs: Sequence[Any],
        lower_forward: Callable[[Callable[..., Any]], tuple[TracedStep, Runnable]],
        *,
        exact: bool,
    ) -> tuple[TracedStep, Runnable]:
        """Lower the step with a backward that recomputes activations, or without where torch cannot do it."""
        is_recorded = purpose.lower != self._options.lower
        budget = None if is_recorded else self._options.memory_budget
        forward = merge_inputs(self._forward, purpose.repeated)
        try:
            return lower_forward(
                with_recomputation(forward, inputs, purpose.trainable, self._loss_output, budget, exact=exact)
            )
        except (GradweaveError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any, of torch's partitioner
            if budget is not None:
                raise RefusedError(
                    f"memory_budget={budget}: torch cannot recompute the activations of this model, "
                    f"give None or 1, or use torch.utils.checkpoint: {error}"
                ) from error
            if is_checkpointed(forward):
                raise NotOneGraphError(
                    "what torch.utils.checkpoint marks cannot be compiled, maybe because of random numbers in it; use "
                    f'lower="replay", or memory_budget instead of it: {error}'
                ) from error
            announce(f"compile: all activations are kept, torch cannot recompute them: {type(error).__name__}")
            return lower_forward(forward)

    def _replay(self, objective: Objective, optimizer: OptimizerInputs, recipe: Recipe) -> tuple[TracedStep, Runnable]:
        traced = trace_step(objective, optimizer, recipe, exact=True)
        _split(traced)  # so that a recorded step has W apart from X
        state = [x for x in optimizer.state() if x.dim() > 0]
        written = [*objective.inputs, *recipe.sums, *recipe.scale, *state]
        keep_order = has_aliases(written, self._state.batch)
        call = self._call_of(traced, recipe) if recipe.update and self._state.mark is None else None
        if call is None:
            return traced, Replay(traced, keep_order=keep_order)
        if keep_order:
            raise unsupported(call, "weights, buffers or state of this step share memory")
        inputs = [*objective.inputs, *recipe.sums, *recipe.scale]
        slotted = self._slots(traced, call, inputs, traced.graph, len(inputs), len(optimizer.state()))
        return traced, Replay(traced, slotted=slotted)

    def _compile(
        self, objective: Objective, optimizer: OptimizerInputs, recipe: Recipe, inputs: Sequence[Any]
    ) -> tuple[TracedStep, Runnable]:
        options = self._options
        counts = self._state.counts(optimizer.params)
        optimizer = OptimizerInputs(self._optimizer, optimizer.params)  # again: the counts are other tensors now
        if recipe.update and recipe.scaling:
            # Which state leaves the graph with the scalars is known only of a traced step, and the graph must not
            # restore that when an update is skipped. So the step is traced twice.
            trial = trace_step(objective, optimizer, replace(recipe, scaling=None))
            recipe = replace(recipe, unguarded=moved_slots(trial, counts.slots(optimizer)))
        traced = trace_step(objective, optimizer, recipe)
        options.report(f"compiling {len(traced.graph.graph.nodes)} operations")
        if options.policy not in ("auto", "ddp") or self._state.costs is not None:
            _split(traced)
        call = self._call_of(traced, recipe) if recipe.update else None
        slots = None if call is None else partial(self._slots, traced, call, inputs)
        try:
            compiled = Compiled(traced, self._state, inputs, slots=slots)
        except UnsupportedError as error:
            if options.policy != "auto":
                raise
            announce(f"compile: one stream, {error.reason}")
            compiled = Compiled(traced, self._state, inputs)
        # What a call leaves to the next one lies elsewhere each time, and a graph reads where it read when captured.
        leaves_work = slots is not None and call is not None and call.carries
        if options.capture and optimizer.params[0].is_cuda and options.replicas is None and not leaves_work:
            changed = traced.changed_inputs()
            return traced, Captured(compiled, self._in_place(changed, inputs), changed)
        return traced, compiled

    def _call_of(self, traced: TracedStep, recipe: Recipe) -> StepCall | None:
        """Return what a call runs by the schedule that was asked for; None if the compiler's order stays.

        Notes each operation's task, for passes that make other graphs of the step.
        """
        options, costs = self._options, self._state.costs
        if options.policy == "auto" and costs is None:
            return None
        tasks = traced.tasks(self._model)
        note_places(tasks.places)
        if recipe.averaging is not None:
            return self._call_of_ranks(traced, recipe.averaging, tasks)
        if costs is not None and self._state.are_costs_ours:
            costs = costs_of_layers(costs, tasks.layers)
        schedule = schedule_for(options.policy, costs, tasks.layers, traced.optimizer.params[0].device)
        if schedule is None:
            return None
        options.report(f"planned by policy {schedule.policy!r}")
        return step_call(schedule)

    def _call_of_ranks(self, traced: TracedStep, averaging: Averaging, tasks: StepTasks) -> StepCall | None:
        policy, replicas = self._options.policy, self._options.replicas
        if replicas is None or policy not in ("no_barrier", "reverse_first_k"):
            return None  # a pass of the tracer sends messages behind their gradients, and waits at the updates
        number_of = {name: number for number, name in enumerate(tasks.layers)}
        names = module_names(traced.optimizer.params, self._model)
        messages = [list(dict.fromkeys(number_of[names[param]] for param in message)) for message in averaging.messages]
        return step_call(schedule_for_ranks(policy, tasks.layers, messages, replicas.held_back, replicas.size))

    def _slots(
        self,
        traced: TracedStep,
        call: StepCall,
        inputs: Sequence[Any],
        graph: GraphModule,
        first_state: int,
        state_count: int,
    ) -> SlottedStep:
        """Give the operations of a graph of the step their slots; tensors of the model and the optimizer last."""
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        in_place = set(self._in_place(traced.changed_inputs(), inputs))
        state = placeholders[first_state : first_state + state_count]
        own = set(map(id, traced.optimizer.params))
        pending = [placeholders[index] for index, x in enumerate(inputs) if id(x) in own] + state
        lasting = [placeholders[index] for index in in_place] + state
        return slot_operations(graph.graph, noted_places(graph.graph), call, lasting=lasting, pending=pending)

    def _in_place(self, changed: Collection[int], inputs: Sequence[Any]) -> list[int]:
        """Return the inputs that must be used where they are: the model's own, and those that the step changes."""
        own = {id(x) for x in (*self._model.parameters(), *self._model.buffers())}
        return [index for index, x in enumerate(inputs) if id(x) in own or index in changed]


def _split(traced: TracedStep) -> None:
    split_convolution_backward(traced.graph.graph)
    traced.graph.recompile()


def _refuse_hooks(params: Sequence[nn.Parameter]) -> None:
    for p in params:
        if gradient_hooks(p):
            raise HookError(f"a parameter of shape {tuple(p.shape)} has a gradient hook; remove it")
