"""Measurements of one variant of a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from gradweave.compare.statistics import Ratio
from gradweave.compare.variants import OTHER_RULES, WHOLE

LAST_STEPS = 5
"""Number of steps over which the last loss is averaged."""


@dataclass(frozen=True)
class Result:
    """Measurements of one variant.

    Attributes:
        label: The variant's name.
        description: The variant in a line.
        learning_rate: Learning rate at the start.
        milliseconds: 20th, 50th and 80th percentile per step.
        parts: The same for forward, backward and update, of recorded steps; empty for whole steps.
        throughput: Samples per second.
        peak_bytes: Most GPU memory; None on the CPU.
        speedup: Against the baseline, over rounds in which both ran.
        claim: Whether the speed-up is larger than the difference of two equal variants.
        difference: Largest difference of any weight from the baseline's after the same training; on a GPU, after a
            short one with deterministic kernels.
        loss_difference: Largest relative difference of a loss from the baseline's, in the first steps.
        is_finite: Whether all of its losses and weights are finite.
        losses: Loss of every step.
    """

    label: str
    description: str
    learning_rate: float
    milliseconds: tuple[float, float, float]
    parts: dict[str, tuple[float, float, float]]
    throughput: float
    peak_bytes: int | None
    speedup: Ratio
    claim: bool
    difference: float
    loss_difference: float
    is_finite: bool
    losses: list[float] = field(repr=False)

    @property
    def sameness(self) -> str:
        """Distance of its training from the baseline's, in a word or two."""
        if not self.is_finite:
            return "not finite"
        if self.identical:
            return "same"
        if self.label in OTHER_RULES:
            return f"loss {self.last_loss:.3g}"
        if self.label in WHOLE:
            return f"loss {self.loss_difference:.0e}"
        return f"{self.difference:.0e} off"

    @property
    def last_loss(self) -> float:
        """Mean loss of the last steps."""
        return mean(self.losses[-LAST_STEPS:])

    @property
    def identical(self) -> bool:
        """Whether every weight is the baseline's, bit for bit."""
        return self.is_finite and self.difference == 0.0

    @property
    def first_broken_step(self) -> int | None:
        """Number of the first step, counted from 1, whose loss is not finite; None if there is none."""
        return next((number for number, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON; null where they are not finite, for which JSON has no numbers."""
        return {
            "mode": self.label,
            "description": self.description,
            "learning_rate": self.learning_rate,
            "milliseconds_per_step": self.milliseconds,
            "parts_milliseconds": self.parts,
            "samples_per_second": self.throughput,
            "peak_bytes": self.peak_bytes,
            "speedup": self.speedup.value,
            "speedup_interval": [self.speedup.low, self.speedup.high],
            "claim": self.claim,
            "finite": self.is_finite,
            "identical": self.identical,
            "largest_difference": finite_or_none(self.difference),
            "largest_relative_loss_difference": finite_or_none(self.loss_difference),
            "losses": [finite_or_none(loss) for loss in self.losses],
        }


def finite_or_none(value: float) -> float | None:
    """Return a number, or None if it is not finite, for which JSON has no numbers."""
    return value if math.isfinite(value) else None
