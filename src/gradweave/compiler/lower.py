"""Making a traced step run: operation by operation as it was traced, or compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from gradweave._compat.eager import add_one
from gradweave._compat.tracing import compile_with_inductor
from gradweave._logging import announce
from gradweave._runtime.buckets import mark_written
from gradweave.compiler.kernel_combining import small_kernels
from gradweave.compiler.passes.placement import (
    draws_in_update,
    take_out_counters,
    updates_at_their_gradients,
)
from gradweave.compiler.passes.scalars import split_scalars
from gradweave.compiler.passes.two_streams import OnTwoStreams, cut
from gradweave.compiler.shared_state import SharedState
from gradweave.compiler.trace import TracedStep
from gradweave.step_graph.recording import Mark, run_by_task
from gradweave.step_graph.tasks import StepTasks, split_convolution_backward

Progress = Callable[[str], None]


class Runnable(Protocol):
    """A step that can be taken."""

    def valid(self) -> bool:
        """Whether it still fits the optimizer's state."""

    def lasting(self) -> bool:
        """Whether it may fit again, when it does not now."""

    def run(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Takes the step; returns the traced outputs."""


class Replay:
    """The traced operations one after the other: bit for bit what the eager step computes.

    Once :meth:`hurry` was called, updates are done as soon as they can, so that gradients need not all be there at
    once; but in the order in which they were traced where that could be seen, as they draw random numbers or weights
    share memory. Every operation of backward is for an input or for weights, so that their tasks can be told apart.

    Args:
        traced: The step.
        in_order: Whether weights, buffers or state share memory.
    """

    def __init__(self, traced: TracedStep, *, in_order: bool = False) -> None:
        self._traced = traced
        split_convolution_backward(traced.graph.graph)
        traced.graph.recompile()
        self._waits = in_order or draws_in_update(traced.graph)

    def hurry(self) -> None:
        """Lets updates come before the end of backward: for a step that has run, or need not be undone if it fails."""
        if not self._waits:
            updates_at_their_gradients(self._traced.graph)
            self._waits = True

    def valid(self) -> bool:
        """Always: nothing is kept between steps."""
        return True

    def lasting(self) -> bool:
        """Always, likewise."""
        return True

    def run(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Takes the step on the optimizer's state and numbers as they are now."""
        optimizer = self._traced.optimizer
        result: list[Any] = self._traced.graph(list(inputs), optimizer.state(), optimizer.values())
        return result[:-1] if self._traced.can_skip else result


def run_marked(traced: TracedStep, inputs: Sequence[torch.Tensor], tasks: StepTasks, mark: Mark) -> list[Any]:
    """Take a traced step like :class:`Replay`, each task of a layer in a context of its own."""
    optimizer = traced.optimizer
    given = [list(inputs), optimizer.state(), optimizer.values()]
    result: list[Any] = run_by_task(traced.graph, traced.graph.graph, given, tasks.places, mark)
    return result[:-1] if traced.can_skip else result


class Compiled:
    """The step as Inductor compiles it, and a small program for its scalars that runs first.

    Args:
        traced: The step.
        shared: What it has in common with steps of other shapes.
        inputs: Examples.
        upper: The layer from which on weight gradients and updates run on a second stream; None for one stream.
            The traced operations know their places then.
    """

    def __init__(
        self, traced: TracedStep, shared: SharedState, inputs: Sequence[torch.Tensor], *, upper: int | None = None
    ) -> None:
        self._optimizer = traced.optimizer
        self._can_skip = traced.can_skip
        self._shared = shared
        self._counts = counts = shared.counts(self._optimizer.params)
        params = self._optimizer.params
        wide = any(p.dtype is torch.float64 for p in params)
        dtype = torch.float64 if wide else torch.float32
        classes = counts.classes(self._optimizer)
        split = split_scalars(traced, classes, dtype, params[0].device)
        self._vectors = [counts.vectors[classes.index(members)] for members in split.classes]
        self._advancing = [self._vectors[index] for index in split.advancing]
        self._main_state = split.main_state
        self._main_scalars = [len(split.advancing) + index for index in split.main_scalars]
        self._numbers = torch.tensor(self._optimizer.numbers(), dtype=torch.float64, device=params[0].device)
        self._uploaded = self._optimizer.numbers()
        firsts = [vector[0] for vector in self._vectors]
        examples = split.scalars(self._numbers, firsts)
        self._scalars = compile_with_inductor(_flat(split.scalars), [self._numbers, *firsts], small_kernels)
        state = self._optimizer.state()
        self._state = [state[slot] for slot in self._main_state]
        self._counters = take_out_counters(split.main, traced.inputs)
        scalars = [examples[index] for index in self._main_scalars]
        self._main = _compiled(split.main, [*inputs, *self._state, *scalars], upper)

    def valid(self) -> bool:
        """Whether the optimizer's state is what this was made for; other tensors of its kind are taken over."""
        if not self._shared.is_current(self._counts):
            return False
        state = self._optimizer.state()
        self._state = [state[slot] for slot in self._main_state]
        return True

    def lasting(self) -> bool:
        """Whether its counts are still the optimizer's."""
        return self._shared.has(self._counts)

    def tensors(self) -> list[torch.Tensor]:
        """The optimizer's tensors that the step reads and writes."""
        return [*self._vectors, *self._state]

    def prepare(self) -> None:
        """Brings the hyperparameters to where the graph reads them."""
        numbers = self._optimizer.numbers()
        if numbers != self._uploaded:
            self._numbers.copy_(torch.tensor(numbers, dtype=torch.float64), non_blocking=True)
            self._uploaded = numbers

    def launch(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """The step's work on the device."""
        firsts = [vector[0] for vector in self._vectors]
        made = self._scalars(self._numbers, *firsts)
        outputs: list[Any] = list(self._main(*inputs, *self._state, *(made[i] for i in self._main_scalars)))
        if self._counters:
            add_one([inputs[index] for index in self._counters])
        skipped = outputs.pop()[0] > 0 if self._can_skip else None
        for vector, value in zip(self._advancing, made, strict=False):
            vector.copy_(value if skipped is None else torch.where(skipped, vector, value))
        return outputs

    def run(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Takes the step."""
        self.prepare()
        outputs = self.launch(inputs)
        self.finish()
        return outputs

    def finish(self) -> None:
        """Tells autograd of changed weights, and our own book-keeping of changed counts."""
        mark_written(self._optimizer.params)
        self._counts.note_written()


def _compiled(main: torch.fx.GraphModule, examples: list[torch.Tensor], upper: int | None) -> Callable[..., Any]:
    """The graph in one piece, or in pieces on two streams."""

    def lower(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return compile_with_inductor(graph, inputs, small_kernels)

    parts = None if upper is None else cut(main, upper)
    if upper is not None and parts is None:
        announce("compile: one stream, the updates of this step cannot be taken apart from the rest")
    return lower(main, examples) if parts is None else OnTwoStreams(parts, examples, lower)


def _flat(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph with its inputs and outputs one by one, as compilers want it."""
    return torch.fx.GraphModule(module, _without_codegen(module.graph))


def _without_codegen(graph: torch.fx.Graph) -> torch.fx.Graph:
    flat = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    result = flat.graph_copy(graph, copied)
    flat.output(result)
    return flat
