"""Weight gradients on a second stream, all else in stock order."""

from __future__ import annotations

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.one_device import (
    MAIN,
    SIDE,
    forward,
    input_gradients,
    stream,
    updates,
    weight_gradients,
)
from gradweave.schedule.schedule import Schedule


def side_stream(graph: TaskGraph) -> Schedule:
    """Run every weight gradient on a second stream, as soon as its inputs are there."""
    main: list[int] = []
    side: list[int] = []
    for step in range(graph.steps):
        main += forward(graph, step) + input_gradients(graph, step) + updates(graph, step)
        side += weight_gradients(graph, step)
    main += forward(graph, graph.steps)
    return Schedule(graph, (stream(MAIN, main), stream(SIDE, side)), policy="side_stream")
