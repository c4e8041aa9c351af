"""Stages: a row of layers cut into runs that cost about the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from gradweave.errors import ArgumentError
from gradweave.schedule import Buffer, Costs, Kind, LayerCost, TaskGraph, pipeline
from gradweave.schedule.links import Link

_SLACK = 1 + 1e-9
"""Sums of floats in another order differ by rounding."""
UNKNOWN = "unknown"
"""Source of costs that were not measured."""


def by_layer(costs: Costs | None, names: Sequence[str]) -> tuple[Costs, list[range]]:
    """Return costs in the order of a model's layers, and the entries that belong to each layer.

    Args:
        costs: By the names of modules, such as ``"3.attention.out"`` in layer ``"3"``; None counts layers as
            equal.
        names: Of the layers. One without costs costs nothing.
    """
    if costs is None:
        equal = Costs(tuple(LayerCost(name, 1.0, 1.0, 1.0) for name in names), source=UNKNOWN)
        return equal, [range(i, i + 1) for i in range(len(names))]
    parts: dict[str, list[LayerCost]] = {name: [] for name in names}
    for layer in costs.layers:
        owner = layer.name.partition(".")[0]
        if owner not in parts:
            raise ArgumentError("costs", layer.name, "is not of a layer of this model; measure the model that is given")
        parts[owner].append(layer)
    ordered: list[LayerCost] = []
    spans = []
    for name, own in parts.items():
        own = own or [LayerCost(name, 0.0, 0.0, 0.0)]
        spans.append(range(len(ordered), len(ordered) + len(own)))
        ordered += own
    return Costs(tuple(ordered), costs.name, costs.source), spans


def balance(weights: Sequence[float], parts: int) -> list[range]:
    """Cut a row into runs, none empty, of which the heaviest is as light as can be and the others are alike.

    Among the cuts that have the lightest heaviest run, dynamic programming takes the one with the least sum of squares.

    Args:
        weights: The cost of each layer.
        parts: Number of runs.
    """
    if not 1 <= parts <= len(weights):
        raise ArgumentError("stages", parts, f"give 1 to {len(weights)}: a stage has one layer at least")
    sums = [0.0, *accumulate(weights)]
    bound = _heaviest(weights, parts) * _SLACK * _SLACK
    infinite = float("inf")
    squares = [0.0] + [infinite] * len(weights)
    cuts: list[list[int]] = []
    for part in range(parts):
        best, cut = [infinite] * (len(weights) + 1), [0] * (len(weights) + 1)
        for end in range(part + 1, len(weights) + 1):
            for start in range(end - 1, part - 1, -1):
                weight = sums[end] - sums[start]
                if weight > bound:
                    break
                if squares[start] + weight * weight < best[end]:
                    best[end], cut[end] = squares[start] + weight * weight, start
        squares = best
        cuts.append(cut)
    runs, end = [], len(weights)
    for cut in reversed(cuts):
        runs.append(range(cut[end], end))
        end = cut[end]
    return runs[::-1]


def _heaviest(weights: Sequence[float], parts: int) -> float:
    """Return the least bound within which a row can be cut into so many runs, by bisection."""
    low, high = max(max(weights), sum(weights) / parts), sum(weights)
    for _ in range(60):
        middle = (low + high) / 2
        if _runs_within(weights, middle) <= parts:
            high = middle
        else:
            low = middle
    return high


def _runs_within(weights: Sequence[float], bound: float) -> int:
    runs, filled = 1, 0.0
    for weight in weights:
        if filled + weight > bound * _SLACK:
            runs, filled = runs + 1, 0.0
        filled += weight
    return runs


def cut(costs: Costs, spans: Sequence[range], stages: int) -> list[range]:
    """Return the layers of each stage, balanced by their costs.

    Args:
        costs: As fine as they were measured.
        spans: The costs of each layer.
        stages: Number of runs.
    """
    weights = [sum(_seconds(costs.layers[i]) for i in span) for span in spans]
    if not any(weights):
        weights = [1.0] * len(weights)
    return balance(weights, stages)


def _seconds(layer: LayerCost) -> float:
    return layer.forward + layer.input_grad + layer.weight_grad


def stage_graph(
    costs: Costs,
    runs: Sequence[range],
    *,
    ranks: int,
    microbatches: int,
    link: Link = Link(),
    counts_arrivals: bool = True,
) -> TaskGraph:
    """Return a pipeline's graph in which each stage is one layer, for policies to order.

    A stage sends the output of its last layer, but keeps the inputs of all of its layers from F until W. The gradient
    of its last output is sent to it, those of the others are made in X; it keeps all of them until W.

    Args:
        costs: As fine as they were measured.
        runs: The costs of each stage.
        ranks: Number of devices.
        microbatches: Per step.
        link: Between ranks.
        counts_arrivals: Whether a gradient that was sent counts before its X begins. Orders found without that may fill
            a budget better, and must be judged by the whole simulation.
    """
    stages = [_merged([costs.layers[i] for i in run], number) for number, run in enumerate(runs)]
    graph = pipeline(Costs(tuple(stages)), stages=ranks, microbatches=microbatches, link=link)
    buffers = list(graph.buffers) if counts_arrivals else []
    for stage, run in enumerate(runs):
        inputs = sum(costs.layers[i].input_bytes for i in (run[1:] if counts_arrivals else run))
        gradients = sum(costs.layers[i].output_bytes for i in (run[:-1] if counts_arrivals else run))
        for microbatch in range(microbatches):
            f, x, w = (graph.index[kind, stage, microbatch, 0] for kind in (Kind.F, Kind.X, Kind.W))
            buffers += [Buffer(inputs, "", (f, w)), Buffer(gradients, "", (x, w))]
    return replace(graph, buffers=tuple(buffers))


def _merged(layers: Sequence[LayerCost], number: int) -> LayerCost:
    return LayerCost(
        f"stage{number}",
        forward=sum(layer.forward for layer in layers),
        input_grad=sum(layer.input_grad for layer in layers),
        weight_grad=sum(layer.weight_grad for layer in layers),
        update=sum(layer.update for layer in layers),
        input_bytes=layers[0].input_bytes,
        output_bytes=layers[-1].output_bytes,
        parameter_bytes=sum(layer.parameter_bytes for layer in layers),
    )
