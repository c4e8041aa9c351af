"""Optimizer fusion with the next forward (Jiang et al. 2021), run ahead on a second stream."""

from __future__ import annotations

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.one_device import MAIN, SIDE, backward, forward, stream, updates
from gradweave.schedule.schedule import Schedule


def forward_fusion(graph: TaskGraph) -> Schedule:
    """Update each layer before its next forward, on a second stream beside that forward.

    Updates wait for the end of backward, when a global norm of gradients is known.
    """
    main: list[int] = []
    side: list[int] = []
    waits: list[tuple[int, int]] = []
    for step in range(graph.steps):
        main += forward(graph, step) + backward(graph, step)
        updates_of_step = updates(graph, step)
        waits.append((updates_of_step[0], main[-1]))
        side += updates_of_step
    main += forward(graph, graph.steps)
    return Schedule(graph, (stream(MAIN, main), stream(SIDE, side)), tuple(waits), "forward_fusion")
