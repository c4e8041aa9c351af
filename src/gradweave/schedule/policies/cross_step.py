"""Weight gradients that may cross into the next step's forward (Oh et al. 2022)."""

from __future__ import annotations

from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.joint import lay_out_backward
from gradweave.schedule.policies.one_device import MAIN, SIDE, forward, stream
from gradweave.schedule.policies.regions import Placement, fastest_within_budget, make_regions, place_weight_gradients
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Kind


def cross_step(graph: TaskGraph, *, byte_budget: int | None = None) -> Schedule:
    """Like joint, but weight gradients may wait for the next forward, up to the use of their weight.

    Updates run as in forward-fusion, on the second stream before the next use of each layer; that of a layer whose
    weight gradient was put off follows the gradient.

    Args:
        graph: A graph of one device.
        byte_budget: Most bytes the device may hold (default: no bound).
    """

    def schedule(hold_limit: float) -> Schedule:
        crossing, staying = (
            place_weight_gradients(graph, make_regions(graph, with_next_forward=crosses), hold_limit)
            for crosses in (True, False)
        )
        return _schedule(graph, crossing, staying)

    return fastest_within_budget(graph, schedule, byte_budget)


def _schedule(graph: TaskGraph, crossing: Placement, staying: Placement) -> Schedule:
    main: list[int] = forward(graph, 0)
    side: list[int] = []
    waits: list[tuple[int, int]] = []
    for step in range(graph.steps):
        placement = crossing if step + 1 < graph.forwards else staying
        lay_out_backward(graph, placement, step, main, side, waits)
        _lay_out_updates(graph, placement, step, main, side, waits)
    return Schedule(graph, (stream(MAIN, main), stream(SIDE, side)), tuple(waits), "cross_step")


def _lay_out_updates(
    graph: TaskGraph, placement: Placement, step: int, main: list[int], side: list[int], waits: list[tuple[int, int]]
) -> None:
    """Append the next forward to ``main``; its updates, and the weight gradients put off into it, to ``side``.

    A region's updates come one region ahead, so that they run beside the region before it.
    """
    index = graph.index
    regions = [region for region in placement.regions if region.is_forward]
    put_off = {layer for region in regions for layer in region.beside}
    end_of_backward = main[-1]

    def update(layers: list[int]) -> None:
        for task in graph.find(Kind.U, [layer for layer in layers if layer not in put_off], step):
            side.append(task)
            waits.append((task, end_of_backward))

    if not regions:
        update(list(range(graph.layers)))
        return
    update(regions[0].layers)
    for number, region in enumerate(regions):
        before = main[-1]
        main += graph.find(Kind.F, region.layers, step + 1)
        if number + 1 < len(regions):
            update(regions[number + 1].layers)
        for layer in region.beside:
            side += [index[Kind.W, layer, 0, step], index[Kind.U, layer, 0, step]]
            waits.append((side[-2], before))
