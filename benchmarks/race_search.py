"""Which trials tell the best of two hyperparameters, with as many trials for everybody.

Settings are points of a grid: the first coordinate is a power of the quarter-root of ten, times a usual value; the
second is a place in a list of values. Whatever is best so far must have been tried with less and with more of either
before anything finer is tried: so the grid grows where its edge is the best, and that is paid out of the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

Point = tuple[int, int]
FINE, COARSE = 1, 2


def next_points(worth: Mapping[Point, float], *, budget: int, values: int, start: int, safe: int = -1) -> list[Point]:
    """Return the trials to be made next, of which none depends on another.

    Args:
        worth: What trials gave, the less the better; infinite for those that diverged.
        budget: How many may be made in all.
        values: How many the second hyperparameter has.
        start: Which of them is tried first.
        safe: In which direction to look where everything diverged: -1 to lower ones of the first, or 1.
    """
    left = budget - len(worth)
    if not worth:
        return [(-COARSE, start), (0, start), (COARSE, start)][:left]
    best = min(worth, key=worth.__getitem__)
    if math.isinf(worth[best]):
        return [(safe * max(safe * rate for rate, _ in worth) + safe * COARSE, start)][:left]
    for wanted in _around(best, worth):
        missing = [point for point in wanted if point not in worth and 0 <= point[1] < values]
        if missing:
            return missing[:left]
    return []


def is_at_edge(worth: Mapping[Point, float]) -> bool:
    """Return whether more, or less, of a hyperparameter than the best was never tried."""
    best = min(worth, key=worth.__getitem__)
    return any(point not in worth for point in (*_outside(best, worth), *_beside(best)))


def _around(best: Point, worth: Mapping[Point, float]) -> Iterator[list[Point]]:
    rate, value = best
    yield _outside(best, worth)
    yield _beside(best)
    yield [(rate - FINE, value), (rate + FINE, value)]
    for reach in range(1, 20):
        yield [(rate + sign * reach, value + other) for sign in (-1, 1) for other in (-1, 1)]
        yield [(rate, value - reach), (rate, value + reach)]
        yield [(rate - reach, value), (rate + reach, value)]


def _outside(best: Point, worth: Mapping[Point, float]) -> list[Point]:
    """Return the sides on which the first hyperparameter of the best has no neighbour."""
    rate, value = best
    return [
        (rate + sign * COARSE, value)
        for sign in (-1, 1)
        if not any((rate + sign * reach, value) in worth for reach in (FINE, COARSE))
    ]


def _beside(best: Point) -> list[Point]:
    return [(best[0], best[1] - 1), (best[0], best[1] + 1)]
