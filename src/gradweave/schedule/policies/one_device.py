"""Runs of tasks in stock order, shared by the policies for one device and for replicas of it."""

from __future__ import annotations

from collections.abc import Iterable

from gradweave.schedule.builders import DEVICE
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.lanes import Lane
from gradweave.schedule.tasks import Kind

MAIN = f"{DEVICE} main"
SIDE = f"{DEVICE} side"


def forward(graph: TaskGraph, step: int) -> list[int]:
    """Return F of every layer, first layer first; nothing after the last step."""
    return graph.find(Kind.F, range(graph.layers), step) if step < graph.forwards else []


def backward(graph: TaskGraph, step: int) -> list[int]:
    """Return W and X of every layer, last layer first.

    Frameworks pass a layer's input gradient on once the whole layer is done, so X comes last.
    """
    index = graph.index
    return [index[kind, layer, 0, step] for layer in reversed(range(graph.layers)) for kind in (Kind.W, Kind.X)]


def input_gradients(graph: TaskGraph, step: int) -> list[int]:
    """Return X of every layer, last layer first."""
    return graph.find(Kind.X, reversed(range(graph.layers)), step)


def weight_gradients(graph: TaskGraph, step: int) -> list[int]:
    """Return W of every layer, last layer first."""
    return graph.find(Kind.W, reversed(range(graph.layers)), step)


def updates(graph: TaskGraph, step: int) -> list[int]:
    """Return U of every layer, first layer first."""
    return graph.find(Kind.U, range(graph.layers), step)


def updates_before_use(graph: TaskGraph, step: int) -> list[int]:
    """Return U of every layer, those of a message just before the first F of its layers in the next step."""
    uses = forward(graph, step + 1)
    if not uses:
        return updates(graph, step)
    order: list[int] = []
    updated: set[int] = set()
    message_of = {}
    for communication in graph.communication.values():
        for task in (graph.tasks[index] for index in communication):
            if task.step == step:
                message = range(task.layer, task.layer + task.layers)
                message_of.update(dict.fromkeys(message, message))
    for layer, use in enumerate(uses):
        if layer not in updated:
            message = message_of.get(layer, range(layer, layer + 1))
            order += graph.find(Kind.U, message, step)
            updated.update(message)
        order.append(use)
    return order


def stream(name: str, tasks: Iterable[int]) -> Lane:
    """Return a stream of the one device."""
    return Lane(name, DEVICE, tuple(tasks))
