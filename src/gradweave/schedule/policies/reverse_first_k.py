"""Reverse first-k (Oh et al. 2022): gradients that the next forward needs first are sent first."""

from __future__ import annotations

from collections.abc import Callable

from gradweave.errors import ArgumentError
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.list_scheduling import link_lanes
from gradweave.schedule.policies.ddp import DEFAULT_BUCKET_BYTES
from gradweave.schedule.policies.one_device import MAIN, forward, stream, updates_before_use
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.tasks import Kind
from gradweave.schedule.transforms import bucket

_COARSE_STEPS = 12
"""Number of values of k that the first round of the search tries."""
_LEAST_GAIN = 1e-3
"""Least relative gain in step time for which more gradients are held back."""


def reverse_first_k(
    graph: TaskGraph,
    *,
    k: int | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    byte_budget: int | None = None,
) -> Schedule:
    """Hold back weight gradients of the first k layers to the end of backward, then run them in forward order.

    There is no barrier between steps.

    Args:
        graph: A graph of replicas.
        k: Number of layers (default: the fastest, searched by simulation, coarsely and then around the best).
        bucket_bytes: As for ddp.
        byte_budget: Most bytes that a device may hold (default: no bound).
    """
    if k is not None:
        if not 0 <= k <= graph.layers:
            raise ArgumentError("k", k, f"give 0 to {graph.layers}, the number of layers")
        schedule = _schedule(graph, k, bucket_bytes)
        schedule.validate(byte_budget=byte_budget)
        return schedule
    return _fastest(lambda candidate: _schedule(graph, candidate, bucket_bytes), graph.layers, byte_budget)


def _schedule(graph: TaskGraph, k: int, bucket_bytes: int) -> Schedule:
    return held_back(bucket(graph, bucket_bytes, k=k), k)


def held_back(graph: TaskGraph, k: int) -> Schedule:
    """Return the schedule of a graph whose messages are those of reverse first-k."""
    layers = range(graph.layers)
    index = graph.index
    order = forward(graph, 0)
    for step in range(graph.steps):
        for layer in reversed(layers):
            if layer >= k:
                order.append(index[Kind.W, layer, 0, step])
            order.append(index[Kind.X, layer, 0, step])
        order += graph.find(Kind.W, layers[:k], step)
        order += updates_before_use(graph, step)
    return Schedule(graph, (stream(MAIN, order), *link_lanes(graph)), policy="reverse_first_k", options={"k": k})


def _fastest(schedule: Callable[[int], Schedule], layers: int, byte_budget: int | None) -> Schedule:
    """Return the fastest schedule; of those about as fast, the one that holds back least."""
    found: dict[int, tuple[float, Schedule]] = {}
    least_peak: int | None = None

    def try_all(candidates: range) -> None:
        nonlocal least_peak
        for k in candidates:
            if k in found:
                continue
            candidate = schedule(k)
            timeline = candidate.simulate()
            least_peak = timeline.peak_bytes if least_peak is None else min(least_peak, timeline.peak_bytes)
            if byte_budget is None or timeline.peak_bytes <= byte_budget:
                found[k] = (timeline.step_time, candidate)

    stride = max(1, layers // _COARSE_STEPS)
    try_all(range(0, layers + 1, stride))
    while stride > 1 and found:
        best = min(found, key=lambda k: (found[k][0], k))
        reach, stride = stride, max(1, stride // 3)
        try_all(range(max(0, best - reach), min(layers, best + reach) + 1, stride))
    if not found:
        raise ArgumentError("byte_budget", byte_budget, f"give at least {least_peak} bytes: no k holds less")
    good_enough = min(seconds for seconds, _ in found.values()) * (1 + _LEAST_GAIN)
    return found[min(k for k, (seconds, _) in found.items() if seconds <= good_enough)][1]
