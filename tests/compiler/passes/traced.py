"""Small steps traced by hand, with the task of each operation."""

import torch

from gradweave._compat.tracing import fake_mode, fake_of, trace_to_graph
from gradweave.schedule import Costs, Kind, Lane, Schedule, single
from gradweave.schedule.calls import Slot, StepCall
from gradweave.step_graph.tasks import Place

SIZE = 4


def step_of_two(upper, lower, x):
    """A step of two layers: outputs, gradients, updates; its tasks are :data:`TASKS`."""
    y = x * lower
    loss = y * upper
    of_upper = loss + y
    below = loss * upper
    of_lower = below + x
    lower.sub_(of_lower)
    upper.sub_(of_upper)
    return [loss]


TASKS = "F0 F1 W1 X1 W0 U0 U1"


def trace(step, inputs):
    """The graph of a function of vectors, and its inputs."""
    mode = fake_mode()
    graph = trace_to_graph(step)(*(fake_of(mode, torch.ones(SIZE)) for _ in range(inputs)))
    return graph, [node for node in graph.graph.nodes if node.op == "placeholder"]


def placed(graph, tasks):
    """Places of the operations of a graph, in their order: ``"F0 X1"`` and so on; ``-`` for none."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    names = tasks.split()
    assert len(nodes) == len(names), [node.name for node in nodes]
    return {node: Place(Kind(name[0]), int(name[1:])) for node, name in zip(nodes, names, strict=True) if name != "-"}


def call_of(layers, order, waits=()):
    """What a call runs, in this order: ``"F0 ~U1b W1"``, with ``~`` for the step before and ``b`` for a second lane.

    ``waits`` are pairs of positions.
    """
    graph = single(Costs.uniform(layers), steps=1, next_forward=False)
    slots = []
    for name in order.split():
        kind, layer, *lane = name.removeprefix("~")
        slots.append(Slot(graph.tasks[graph.index[Kind(kind), int(layer), 0, 0]], len(lane), name.startswith("~")))
    lanes = tuple(Lane(name, graph.tasks[0].resource, ()) for name in ("main", "side"))
    return StepCall(Schedule(graph, lanes, policy="by hand"), tuple(slots), tuple(waits))
