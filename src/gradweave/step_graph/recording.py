"""Running a graph one operation at a time, with a context around each task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn
from torch.fx import Graph, Interpreter, Node

from gradweave.schedule.tasks import Kind
from gradweave.step_graph.tasks import Place

Mark = Callable[[Kind, int], AbstractContextManager[None]]
"""Returns the context in which a task of a layer runs."""


def run_by_task(
    module: nn.Module, graph: Graph, inputs: Sequence[Any], places: Mapping[Node, Place], mark: Mark
) -> Any:
    """Run a graph of a module on its inputs, each task in its context, and return the graph's outputs."""
    open_task = ExitStack()
    try:
        return _TaskInterpreter(module, graph, places, mark, open_task).run(*inputs)
    finally:
        open_task.close()


class _TaskInterpreter(Interpreter):
    """Interpreter of a graph that runs consecutive operations of one task in one context.

    What a task has read lives until its context ends: the context may run the operations again, and memory that was
    freed and reused before that would have other contents.
    """

    def __init__(
        self, module: nn.Module, graph: Graph, places: Mapping[Node, Place], mark: Mark, open_task: ExitStack
    ) -> None:
        super().__init__(module, graph=graph)
        self._places = places
        self._mark = mark
        self._open_task = open_task
        self._current: Place | None = None
        self._read: list[Any] = []

    def run_node(self, n: Node) -> Any:
        """Run an operation in the context of its task."""
        place = self._places.get(n)
        if place != self._current:
            self._open_task.close()
            self._read.clear()
            if place is not None:
                self._open_task.enter_context(self._mark(place.kind, place.layer))
            self._current = place
        # The interpreter drops a value after its last use; this keeps those that die here until the task ends.
        self._read.extend(self.env[last] for last in self.user_to_last_uses.get(n, ()))
        return super().run_node(n)
