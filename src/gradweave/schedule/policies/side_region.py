"""Weight gradients and updates of the upper layers on a second stream, in one piece."""

from __future__ import annotations

from gradweave.errors import ArgumentError
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.one_device import MAIN, SIDE, forward, stream
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Kind


def side_region(graph: TaskGraph, *, first: int | None = None) -> Schedule:
    """Run weight gradients and updates from one layer upwards beside the backward of the layers below it.

    A compiled step is compiled in pieces: this takes three, where :func:`joint` takes one for each weight gradient.

    Args:
        graph: A graph of one device.
        first: The lowest layer whose weight gradient moves (default: the fastest, searched by simulation).
    """
    if first is not None:
        if not 0 <= first <= graph.layers:
            raise ArgumentError("first", first, f"give 0 to {graph.layers}, the number of layers")
        return _schedule(graph, first)
    candidates = [_schedule(graph, layer) for layer in range(graph.layers, -1, -1)]
    return min(candidates, key=lambda schedule: schedule.simulate().step_time)


def _schedule(graph: TaskGraph, first: int) -> Schedule:
    index = graph.index
    below, above = reversed(range(first)), list(reversed(range(first, graph.layers)))
    main: list[int] = []
    side: list[int] = []
    waits: list[tuple[int, int]] = []
    lower = list(below)
    for step in range(graph.steps):
        main += forward(graph, step) + [index[Kind.X, layer, 0, step] for layer in above]
        own = [index[kind, layer, 0, step] for layer in above for kind in (Kind.W, Kind.U)]
        if own:
            waits.append((own[0], main[-1]))
        side += own
        rest = [index[kind, layer, 0, step] for layer in lower for kind in (Kind.W, Kind.X)]
        main += rest + [index[Kind.U, layer, 0, step] for layer in lower]
        if own and step + 1 < graph.forwards:
            waits.append((index[Kind.F, 0, 0, step + 1], own[-1]))
    main += forward(graph, graph.steps)
    return Schedule(
        graph, (stream(MAIN, main), stream(SIDE, side)), tuple(waits), policy="side_region", options={"first": first}
    )
