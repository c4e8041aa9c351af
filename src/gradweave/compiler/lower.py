"""Traced steps that can be taken: replayed operation by operation, or compiled by Inductor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule

from gradweave._compat.foreach import add_one
from gradweave._compat.tracing import compile_with_inductor
from gradweave._runtime.buckets import mark_written
from gradweave._runtime.deferred.unseen_readers import NEVER_LATE
from gradweave.compiler.kernel_combining import small_kernels
from gradweave.compiler.lanes import Carried, Clock, RegionRunner
from gradweave.compiler.passes.placement import draws_in_update, take_out_counters, updates_at_their_gradients
from gradweave.compiler.passes.regions import RegionedStep, cut, with_own_views
from gradweave.compiler.passes.scalars import split_scalars
from gradweave.compiler.passes.slots import SlottedStep, unsupported
from gradweave.compiler.step_state import StepState
from gradweave.compiler.trace import TracedStep
from gradweave.errors import GradweaveError
from gradweave.schedule.schedule import Schedule
from gradweave.step_graph.recording import Mark, run_by_task
from gradweave.step_graph.tasks import StepTasks

MakeSlots = Callable[[GraphModule, int, int], SlottedStep]
"""Gives a graph's operations their slots; its first inputs are the objective's, the next ones the optimizer's state."""


class Runnable(Protocol):
    """A step that can be taken."""

    def fits(self) -> bool:
        """Return whether the optimizer's state is of the kind that the step was made for, and take it over."""

    def may_fit_again(self) -> bool:
        """Return whether the step may fit later, if it does not now."""

    def run(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Take the step and return the traced outputs."""

    def run_measured(self, inputs: Sequence[torch.Tensor], clock: Clock) -> list[Any]:
        """Take the step by its schedule, in parts that the clock notes."""

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that it runs by; None if it has none."""

    @property
    def carries(self) -> bool:
        """Whether a run has left work to the next one."""

    def references(self) -> Counter[int]:
        """Return how often each object is referred to between runs, by its id."""

    def flush(self) -> None:
        """Do what the last run has left to the next one."""


class Replay:
    """A step whose traced operations run one after the other: bit for bit what the eager step computes.

    The first run is in the traced order, so that a step that fails before it has changed anything can be taken in
    another way. After :meth:`update_early` it is by the schedule, if there is one; otherwise updates run as soon as
    they can, so that gradients need not all be in memory at once, and keep the traced order where another one could be
    seen: where updates draw random numbers, or weights share memory.

    Args:
        traced: The step, with convolutions' backward split where W is to run apart from X.
        keep_order: Whether weights, buffers or state share memory.
        slotted: The step by the slots of its schedule; None if it has none.

    Attributes:
        keeps_order: Whether its operations run in the traced order for good.
    """

    def __init__(self, traced: TracedStep, *, keep_order: bool = False, slotted: SlottedStep | None = None) -> None:
        self._traced = traced
        self._slotted = slotted
        self.keeps_order = slotted is None and keep_order
        self._has_final_order = keep_order or draws_in_update(traced.graph)
        self._carried = Carried()
        self._runner: RegionRunner | None = None
        self._by_task: RegionRunner | None = None

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that it runs by; None if it has none."""
        return None if self._slotted is None else self._slotted.call.schedule

    @property
    def carries(self) -> bool:
        """Whether a run has left work to the next one."""
        return self._carried.values is not None

    def update_early(self) -> None:
        """Let updates run before the end of backward: for a step that has run, or need not be undone if it fails."""
        if self._slotted is not None:
            if self._runner is None:
                self._runner = RegionRunner(cut(self._traced.graph, self._slotted), _as_it_is, None, self._carried)
        elif not self._has_final_order:
            updates_at_their_gradients(self._traced.graph)
            self._has_final_order = True

    def fits(self) -> bool:
        """Return True: nothing of the optimizer is kept between steps."""
        return True

    def may_fit_again(self) -> bool:
        """Return True, likewise."""
        return True

    def run(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Take the step on the optimizer's current state and hyperparameters."""
        given = _given(self._traced, inputs)
        if self._runner is None:
            return _without_skipped(self._traced, self._traced.graph(*given))
        return _without_skipped(self._traced, self._runner(*(value for part in given for value in part)))

    def run_measured(self, inputs: Sequence[torch.Tensor], clock: Clock) -> list[Any]:
        """Take the step by its schedule, each task by itself."""
        if self._slotted is None:
            raise GradweaveError("this step has no schedule; give policy= to compile()")
        if self._by_task is None:
            step = cut(self._traced.graph, self._slotted, by_task=True)
            self._by_task = RegionRunner(step, _as_it_is, None, self._carried)
        given = _given(self._traced, inputs)
        return _without_skipped(self._traced, self._by_task(*(x for part in given for x in part), clock=clock))

    def references(self) -> Counter[int]:
        """Return how often each object is referred to between runs, by its id."""
        return self._carried.references()

    def flush(self) -> None:
        """Run what the last run has left to the next one."""
        if self._runner is not None:
            self._runner.flush()


def _as_it_is(graph: GraphModule, _: list[Any]) -> Callable[..., Any]:
    return graph


def replay_by_task(traced: TracedStep, inputs: Sequence[torch.Tensor], tasks: StepTasks, mark: Mark) -> list[Any]:
    """Take a step as :class:`Replay` does, each task of a layer in a context of its own."""
    outputs = run_by_task(traced.graph, traced.graph.graph, _given(traced, inputs), tasks.places, mark)
    return _without_skipped(traced, outputs)


def _given(traced: TracedStep, inputs: Sequence[torch.Tensor]) -> list[list[Any]]:
    return [list(inputs), traced.optimizer.state(), traced.optimizer.values()]


def _without_skipped(traced: TracedStep, outputs: list[Any]) -> list[Any]:
    """Drop the flag of a skipped update: a graph that is replayed has restored all state itself."""
    return outputs[:-1] if traced.can_skip else outputs


class Compiled:
    """A step compiled by Inductor, and a small program for its scalars that runs first.

    The passes run in this order. Scalars are split off first, because what Inductor compiles must have tensors in the
    place of hyperparameters. Counters such as BatchNorm's are then taken out of what is left. That is cut into the
    regions of a schedule last, because these are compiled as they are.

    Args:
        traced: The step; its operations know their places if it is to run by a schedule.
        state: Of the step that this is a graph of.
        inputs: Examples.
        slots: Gives the operations of a graph their slots in a schedule, given the inputs that last; None for the
            compiler's own order.
    """

    def __init__(
        self, traced: TracedStep, state: StepState, inputs: Sequence[torch.Tensor], *, slots: MakeSlots | None = None
    ) -> None:
        self._optimizer = traced.optimizer
        self._can_skip = traced.can_skip
        self._step_state = state
        params = self._optimizer.params
        self._counts = counts = state.counts(params)
        wide = any(p.dtype is torch.float64 for p in params)
        dtype = torch.float64 if wide else torch.float32
        classes = counts.slots(self._optimizer)
        split = split_scalars(traced, classes, dtype, params[0].device)
        self._vectors = [counts.vectors[classes.index(members)] for members in split.classes]
        self._advancing = [self._vectors[index] for index in split.advancing]
        self._main_slots = split.main_state
        self._main_scalars = [len(split.advancing) + index for index in split.main_scalars]
        self._numbers = torch.tensor(self._optimizer.numbers(), dtype=torch.float64, device=params[0].device)
        self._uploaded = self._optimizer.numbers()
        firsts = [vector[0] for vector in self._vectors]
        examples = split.scalars(self._numbers, firsts)
        self._scalars = compile_with_inductor(_flat(split.scalars), [self._numbers, *firsts], small_kernels)
        self._main_state: list[torch.Tensor] = []
        self._take_over_state()
        self._counters = take_out_counters(split.main, traced.input_count)
        scalars = [examples[index] for index in self._main_scalars]
        examples = [*inputs, *self._main_state, *scalars]
        self._runner: RegionRunner | None = None
        if slots is None:
            self._main = _compile(split.main, examples)
        else:
            regions = _regions(split.main, slots(split.main, len(inputs), len(self._main_state)))
            self._main = self._runner = RegionRunner(regions, _compile, examples)

    def _take_over_state(self) -> None:
        state = self._optimizer.state()
        self._main_state = [state[slot] for slot in self._main_slots]

    def fits(self) -> bool:
        """Return whether the step counts are those that this was made for, and take over the rest of the state."""
        if not self._step_state.is_current(self._counts):
            return False
        self._take_over_state()
        return True

    def may_fit_again(self) -> bool:
        """Return whether its step counts are still in use."""
        return self._step_state.has(self._counts)

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that it runs by; None if the compiler has chosen the order."""
        return None if self._runner is None else self._runner.step.slotted.call.schedule

    @property
    def carries(self) -> bool:
        """Whether a run has left work to the next one."""
        return self._runner is not None and self._runner.carried.values is not None

    def run_measured(self, inputs: Sequence[torch.Tensor], clock: Clock) -> list[Any]:
        """Take the step by its schedule, region by region."""
        self.upload()
        outputs = self.launch(inputs, clock=clock)
        self.finish()
        return outputs

    def references(self) -> Counter[int]:
        """Return how often each object is referred to between runs, by its id."""
        found = Counter(map(id, self._main_state))
        if self._runner is not None:
            found += self._runner.carried.references()
        return Counter({**found, **dict.fromkeys(self._counts.element_ids(self._vectors), NEVER_LATE)})

    def flush(self) -> None:
        """Run what the last run has left to the next one."""
        if self._runner is not None:
            self._runner.flush()

    def tensors(self) -> list[torch.Tensor]:
        """Return the optimizer's tensors that the step reads and writes."""
        return [*self._vectors, *self._main_state]

    def upload(self) -> None:
        """Copy changed hyperparameters to where the graph reads them."""
        numbers = self._optimizer.numbers()
        if numbers != self._uploaded:
            self._numbers.copy_(torch.tensor(numbers, dtype=torch.float64), non_blocking=True)
            self._uploaded = numbers

    def launch(self, inputs: Sequence[torch.Tensor], *, clock: Clock | None = None) -> list[Any]:
        """Run the step's work on the device, which a CUDA graph can capture."""
        firsts = [vector[0] for vector in self._vectors]
        made = self._scalars(self._numbers, *firsts)
        given = [*inputs, *self._main_state, *(made[i] for i in self._main_scalars)]
        outputs = self._runner(*given, clock=clock) if self._runner is not None else list(self._main(*given))
        if self._counters:
            add_one([inputs[index] for index in self._counters])
        skipped = outputs.pop()[0] > 0 if self._can_skip else None
        # After the main graph: only its last output tells whether the update was skipped, and the counts with it.
        for vector, value in zip(self._advancing, made, strict=False):
            vector.copy_(value if skipped is None else torch.where(skipped, vector, value))
        return outputs

    def run(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Take the step."""
        self.upload()
        outputs = self.launch(inputs)
        self.finish()
        return outputs

    def finish(self) -> None:
        """Tell autograd of changed weights, and the step counts that their change was this step's."""
        mark_written(self._optimizer.params)
        self._counts.note_written()


def _compile(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return compile_with_inductor(graph, inputs, small_kernels)


def _regions(main: GraphModule, slotted: SlottedStep) -> RegionedStep:
    regions = with_own_views(cut(main, slotted))
    if regions is None:
        raise unsupported(slotted.call, "parts of this step change what other parts have made, and cannot be compiled")
    return regions


def _flat(module: GraphModule) -> GraphModule:
    """Return a graph that takes and returns its tensors one by one, without a codegen for nested lists."""
    flat = Graph()
    flat.output(flat.graph_copy(module.graph, {}))
    return GraphModule(module, flat)
