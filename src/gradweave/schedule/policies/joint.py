"""The joint schedule (Oh et al. 2022): weight gradients where they gain most, within backward."""

from __future__ import annotations

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.one_device import MAIN, SIDE, forward, stream, updates
from gradweave.schedule.policies.regions import Placement, fastest_within_budget, make_regions, place_weight_gradients
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Kind


def joint(graph: TaskGraph, *, byte_budget: int | None = None) -> Schedule:
    """Run weight gradients on a second stream, beside the regions of backward where that saves most.

    Those that save nothing anywhere stay on the main stream.

    Args:
        graph: A graph of one device.
        byte_budget: Most bytes the device may hold (default: no bound).
    """

    def schedule(hold_limit: float) -> Schedule:
        placement = place_weight_gradients(graph, make_regions(graph, with_next_forward=False), hold_limit)
        return _schedule(graph, placement, "joint")

    return fastest_within_budget(graph, schedule, byte_budget)


def _schedule(graph: TaskGraph, placement: Placement, policy: str) -> Schedule:
    main: list[int] = []
    side: list[int] = []
    waits: list[tuple[int, int]] = []
    for step in range(graph.steps):
        main += forward(graph, step)
        lay_out_backward(graph, placement, step, main, side, waits)
        main += updates(graph, step)
    main += forward(graph, graph.steps)
    return Schedule(graph, (stream(MAIN, main), stream(SIDE, side)), tuple(waits), policy)


def lay_out_backward(
    graph: TaskGraph, placement: Placement, step: int, main: list[int], side: list[int], waits: list[tuple[int, int]]
) -> None:
    """Append a step's X and inline W to ``main``, the other W to ``side``, region by region.

    A weight gradient put off to a later region waits there for the region to begin: without the wait it would run as
    soon as its inputs are there, beside a region where it saves less.
    """
    index = graph.index
    for region in placement.regions:
        if region.is_forward:
            continue
        before = main[-1]
        for layer in region.layers[::-1]:
            if layer in placement.inline:
                main.append(index[Kind.W, layer, 0, step])
            main.append(index[Kind.X, layer, 0, step])
        for layer in region.beside:
            side.append(index[Kind.W, layer, 0, step])
            waits.append((side[-1], before))
