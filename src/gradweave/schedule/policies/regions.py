"""Placing weight gradients beside regions of the main stream, by gain, under a bound on held bytes.

After Oh et al. 2022: pairs of a weight gradient and a region beside which it may run are taken in the order of the time
they save, while the region has time left and the bytes held meanwhile stay within the bound. The other weight gradients
run beside the last region of backward and its successors, or at their natural places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby

from gradweave.errors import ArgumentError
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.in_order import in_order
from gradweave.schedule.policies.one_device import SIDE, stream
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Demand

_HALVINGS = 8
_LEAST_SAVING = 0.01
"""Least share of a weight gradient's time that running it beside a region must save."""
_LEAST_GAIN_OF_HOLDING = 0.01
"""Least share of a step that must be gained before more bytes are held for it."""


@dataclass
class Region:
    """A block of layers in one direction, and the weight gradients to run beside it.

    Attributes:
        layers: Layers of the block.
        seconds: Time that the main stream spends on it.
        demand: Mean shares of the device meanwhile.
        is_forward: Whether it is a part of the next forward; else of backward.
        taken: Seconds of updates that the second stream must do meanwhile.
        beside: Layers whose weight gradients run beside it.
    """

    layers: list[int]
    seconds: float
    demand: Demand
    is_forward: bool
    taken: float
    beside: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Placement:
    """Regions in running order, and the layers whose weight gradient stays on the main stream."""

    regions: list[Region]
    inline: frozenset[int]


def make_regions(graph: TaskGraph, *, with_next_forward: bool) -> list[Region]:
    """Return one region per block of backward and, if asked for, per block of the next forward."""
    layers = graph.costs.layers
    blocks = [list(run) for _, run in groupby(range(len(layers)), key=lambda i: layers[i].block or f"layer {i}")]
    regions = [_region(graph, block, is_forward=False) for block in reversed(blocks)]
    if with_next_forward:
        regions += [_region(graph, block, is_forward=True) for block in blocks]
    return regions


def _region(graph: TaskGraph, block: list[int], *, is_forward: bool) -> Region:
    costs = [graph.costs.layers[layer] for layer in block]
    main = [(c.forward, c.forward_demand) if is_forward else (c.input_grad, c.input_grad_demand) for c in costs]
    seconds = sum(duration for duration, _ in main)
    mean = [
        sum(duration * share for duration, share in shares) / seconds if seconds else 0.0
        for shares in ([(t, d.compute) for t, d in main], [(t, d.memory) for t, d in main])
    ]
    return Region(block, seconds, Demand(*mean), is_forward, sum(c.update for c in costs) if is_forward else 0.0)


def saved_share(one: Demand, other: Demand) -> float:
    """Return the share of its own duration that a task saves by running beside another."""
    return 2.0 - max(1.0, one.compute + other.compute, one.memory + other.memory)


def place_weight_gradients(graph: TaskGraph, regions: list[Region], hold_limit: float) -> Placement:
    """Fill the regions' ``beside`` lists; return them with the layers that stay on the main stream.

    Args:
        graph: A graph of one device.
        regions: From :func:`make_regions`.
        hold_limit: Most bytes that weight gradients put off past their own region may hold.
    """
    costs = graph.costs.layers
    bounds = _bounds(graph, regions)
    pairs = []
    for layer, (natural, deadline) in enumerate(bounds):
        for number in range(natural, deadline + 1):
            share = saved_share(costs[layer].weight_grad_demand, regions[number].demand)
            if share > _LEAST_SAVING:
                pairs.append((-share * costs[layer].weight_grad, number - natural, layer))
    free = [region.seconds - region.taken for region in regions]
    used = [False] * len(regions)
    held = [0] * len(regions)
    placed: dict[int, int] = {}

    def try_place(layer: int, number: int) -> None:
        natural, size = bounds[layer][0], costs[layer].input_bytes + costs[layer].output_bytes
        if layer in placed or any(bytes_held + size > hold_limit for bytes_held in held[natural:number]):
            return
        placed[layer] = number
        free[number] -= costs[layer].weight_grad
        used[number] = True
        for waiting in range(natural, number):
            held[waiting] += size

    for _, delay, layer in sorted(pairs):
        number = bounds[layer][0] + delay
        if free[number] >= costs[layer].weight_grad or (free[number] > 0 and not used[number]):
            try_place(layer, number)
    last = max(number for number, region in enumerate(regions) if not region.is_forward)
    for layer in sorted({layer for *_, layer in pairs} - placed.keys(), reverse=True):
        try_place(layer, last)
        try_place(layer, bounds[layer][0])
    for layer in sorted(placed, key=lambda layer: (bounds[layer][0], -layer)):
        regions[placed[layer]].beside.append(layer)
    return Placement(regions, frozenset(range(graph.layers)) - placed.keys())


def _bounds(graph: TaskGraph, regions: list[Region]) -> list[tuple[int, int]]:
    """Return the first and the last region beside which each layer's weight gradient may run."""
    natural = [0] * graph.layers
    deadline = [max(i for i, region in enumerate(regions) if not region.is_forward)] * graph.layers
    for number, region in enumerate(regions):
        for layer in region.layers:
            if region.is_forward:
                deadline[layer] = number - 1
            else:
                natural[layer] = number
    return list(zip(natural, deadline, strict=True))


def fastest_within_budget(graph: TaskGraph, schedule: Callable[[float], Schedule], byte_budget: int | None) -> Schedule:
    """Return the fastest of stock order and of schedules under bounds on held bytes from nothing to everything.

    Of those that are about as fast, the one that holds least is taken: bytes are certain, seconds are a prediction.

    Args:
        graph: A graph of one device.
        schedule: Makes a schedule under a bound on held bytes.
        byte_budget: Most bytes that the device may hold (default: no bound).
    """
    most_held = sum(cost.input_bytes + cost.output_bytes for cost in graph.costs.layers)
    limits = [0.0, *(most_held / 2**halving for halving in reversed(range(_HALVINGS)))]
    candidates = [schedule(limit) for limit in limits]
    stock = in_order(graph)
    candidates.insert(0, replace(stock, lanes=(*stock.lanes, stream(SIDE, ())), policy=candidates[0].policy))
    tried = [(candidate, candidate.simulate()) for candidate in candidates]
    least = min(timeline.peak_bytes for _, timeline in tried)
    fitting = [entry for entry in tried if byte_budget is None or entry[1].peak_bytes <= byte_budget]
    if not fitting:
        raise ArgumentError("byte_budget", byte_budget, f"give at least {least}: {tried[0][0].policy} holds no less")
    soon_enough = (1 + _LEAST_GAIN_OF_HOLDING) * min(timeline.step_time for _, timeline in fitting)
    fast = [entry for entry in fitting if entry[1].step_time <= soon_enough]
    return min(fast, key=lambda entry: (entry[1].peak_bytes, entry[1].step_time))[0]
