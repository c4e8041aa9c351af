"""Modulo allocation (Oh et al. 2022): layers dealt out round-robin."""

from __future__ import annotations

from collections.abc import Callable

from gradweave.errors import ArgumentError
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.policies.fast_forward import input_gradients_first
from gradweave.schedule.schedule import Schedule


def modulo(graph: TaskGraph, *, group: int = 1, max_in_flight: int | None = None) -> Schedule:
    """Like fast_forward, with layers dealt out round-robin in groups of ``group``.

    Args:
        graph: An unplaced pipeline graph.
        group: Neighbouring layers that stay together.
        max_in_flight: As for fast_forward.
    """
    return input_gradients_first(graph, round_robin(graph, group), max_in_flight, "modulo")


def round_robin(graph: TaskGraph, group: int) -> Callable[[int], int]:
    """Return the placement that deals layers out in turn, ``group`` of them to a device at a time."""
    if group < 1:
        raise ArgumentError("group", group, "give at least 1 layer")
    stages = graph.cluster.devices
    if stages > 1 and group > (most := (graph.layers - 1) // (stages - 1)):
        raise ArgumentError("group", group, f"give at most {most}: {graph.layers} layers on {stages} stages")
    return lambda layer: layer // group % stages
