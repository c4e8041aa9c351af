"""Ratios of times measured in turn, with confidence intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """A speed-up and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f}x [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(baseline: Sequence[float], other: Sequence[float]) -> Ratio:
    """Return how many times faster ``other`` is: the median over rounds of the ratio within a round.

    Disturbances that both share in a round, such as a busy machine, cancel. The interval is a bootstrap over rounds,
    with a fixed seed.
    """
    logs = [math.log(a / b) for a, b in zip(baseline, other, strict=True)]
    generator = random.Random(0)
    medians = sorted(median(generator.choices(logs, k=len(logs))) for _ in range(_RESAMPLES))
    low, high = medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]
    return Ratio(math.exp(median(logs)), math.exp(low), math.exp(high))


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20th, 50th and 80th percentile."""
    ordered = sorted(values)
    if not ordered:
        return (math.nan, math.nan, math.nan)
    last = len(ordered) - 1
    return ordered[round(0.2 * last)], median(ordered), ordered[round(0.8 * last)]


def is_claim(ratio: Ratio, same: Ratio) -> bool:
    """Return whether a speed-up (or slow-down) is larger than the difference between two equal variants."""
    noise = max(abs(math.log(bound)) for bound in (same.low, same.high))
    return math.log(ratio.low) > noise or math.log(ratio.high) < -noise
