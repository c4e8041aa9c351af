"""Cutting a row of layers into stages that cost about the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from gradweave.errors import ArgumentError
from gradweave.parallel.pipeline.bounded import StageBytes
from gradweave.schedule.costs import Costs, LayerCost

_SLACK = 1 + 1e-9
"""Sums of floats in another order differ by rounding."""


def balance(weights: Sequence[float], parts: int) -> list[range]:
    """Cuts a row into runs, none empty, so that the heaviest is as light as can be, and the others are alike.

    Args:
        weights: What each layer costs.
        parts: How many runs.
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
    """The least bound within which a row can be cut into so many runs."""
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


def cost_of(layer: LayerCost) -> float:
    """Seconds of a layer for one micro-batch."""
    return layer.forward + layer.input_grad + layer.weight_grad


def cut(costs: Costs, spans: Sequence[range], stages: int) -> list[range]:
    """The layers of each stage, balanced by what they cost; ``spans`` are the costs of each layer."""
    weights = [sum(cost_of(costs.layers[i]) for i in span) for span in spans]
    if not any(weights):
        weights = [1.0] * len(weights)
    return balance(weights, stages)


def stage_costs(costs: Costs, runs: Sequence[range]) -> list[LayerCost]:
    """What whole stages cost; their inputs and outputs are those of their first and last layers."""
    return [_together([costs.layers[i] for i in run], number) for number, run in enumerate(runs)]


def stage_bytes(costs: Costs, runs: Sequence[range]) -> list[StageBytes]:
    """What whole stages keep alive: the inputs of their layers, and the gradients of their outputs."""
    return [
        StageBytes(sum(costs.layers[i].input_bytes for i in run), sum(costs.layers[i].output_bytes for i in run))
        for run in runs
    ]


def _together(layers: Sequence[LayerCost], number: int) -> LayerCost:
    return LayerCost(
        f"stage{number}",
        sum(layer.forward for layer in layers),
        sum(layer.input_grad for layer in layers),
        sum(layer.weight_grad for layer in layers),
        sum(layer.update for layer in layers),
        layers[0].input_bytes,
        layers[-1].output_bytes,
        sum(layer.parameter_bytes for layer in layers),
    )
