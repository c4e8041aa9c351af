"""Taking a traced step one operation at a time, and noting when each task begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Interpreter, Node

from gradweave.compiler.trace import TracedStep
from gradweave.schedule.tasks import Kind
from gradweave.step_graph.tasks import Place

Mark = Callable[[Kind, int], AbstractContextManager[None]]
"""Gives the context in which a task of a layer runs."""


def run_marked(traced: TracedStep, inputs: Sequence[torch.Tensor], places: dict[Node, Place], mark: Mark) -> list[Any]:
    """Takes the step on the optimizer's state and numbers as they are; returns the traced outputs."""
    optimizer = traced.optimizer
    given = [list(inputs), optimizer.state(), optimizer.values()]
    result: list[Any] = run_graph(traced.graph, traced.graph.graph, given, places, mark)
    return result[:-1] if traced.can_skip else result


def run_graph(module: nn.Module, graph: Graph, inputs: Sequence[Any], places: dict[Node, Place], mark: Mark) -> Any:
    """Runs a graph of a module on its inputs, each task in its mark; returns what the graph does."""
    open_task = ExitStack()
    try:
        return _Marking(module, graph, places, mark, open_task).run(*inputs)
    finally:
        open_task.close()


class _Marking(Interpreter):
    """Runs a graph; operations of one task that follow each other are inside of one mark.

    What a task has read lives until its mark ends: a mark may do the operations again.
    """

    def __init__(
        self, module: nn.Module, graph: Graph, places: dict[Node, Place], mark: Mark, open_task: ExitStack
    ) -> None:
        super().__init__(module, graph=graph)
        self._places = places
        self._mark = mark
        self._open = open_task
        self._now: Place | None = None
        self._read: list[Any] = []

    def run_node(self, n: Node) -> Any:
        """Runs an operation, in the mark of its task."""
        place = self._places.get(n)
        if place != self._now:
            self._open.close()
            self._read.clear()
            if place is not None:
                self._open.enter_context(self._mark(place.kind, place.layer))
            self._now = place
        self._read.extend(self.env[last] for last in self.user_to_last_uses.get(n, ()))
        return super().run_node(n)
