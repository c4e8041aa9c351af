"""What a comparison found out, of each variant and of all together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from gradweave.compare.statistics import Ratio
from gradweave.compare.trial import Setting, Trial
from gradweave.compare.variants import OTHER_RULES, WHOLE
from gradweave.compare.verdict import verdict

LAST_STEPS = 5
"""Of which the last loss is the mean."""


@dataclass(frozen=True)
class Result:
    """What was measured of one variant.

    Attributes:
        label: Its name.
        description: What it does.
        learning_rate: What it trained with.
        milliseconds: 20th, 50th and 80th percentile per step.
        parts: The same for forward, backward and update, of recorded steps.
        throughput: Samples per second.
        peak_bytes: Most GPU memory; None on the CPU.
        speedup: Against the baseline, of rounds in which both ran.
        claim: Whether the speed-up is beyond the difference of two equal variants.
        difference: Largest difference of any weight from the baseline's after the same training; on a
            GPU, after a short one with deterministic kernels.
        loss_difference: Largest relative difference of a loss from the baseline's, in the first steps.
        is_finite: Whether all of its losses and weights are numbers.
        losses: Of every step.
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
        """How near its training is to the baseline's, in a word or two."""
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
        """The mean of the last steps."""
        return mean(self.losses[-LAST_STEPS:])

    @property
    def identical(self) -> bool:
        """Whether every weight is the baseline's, bit for bit."""
        return self.is_finite and self.difference == 0.0

    @property
    def first_broken_step(self) -> int | None:
        """The first step, from 1 on, whose loss is no number."""
        return next((number for number, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON, which has no word for what is not finite: null."""
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
            "largest_difference": _number(self.difference),
            "largest_relative_loss_difference": _number(self.loss_difference),
            "losses": [_number(loss) for loss in self.losses],
        }


@dataclass(frozen=True)
class Steps:
    """How many steps each variant takes: first to settle, then timed, then recorded part by part."""

    settling: int
    timed: int
    recorded: int

    @property
    def total(self) -> int:
        """All of them; all are training."""
        return self.settling + self.timed + self.recorded


@dataclass(frozen=True)
class Comparison:
    """Results of all variants, the baseline first and the baseline again second.

    Attributes:
        setting: What was asked for.
        results: Of each variant.
        trials: Likewise.
        samples: Fewest and most samples of a batch that was trained on.
        parameters: How many numbers are trained.
        steps: That each variant took.
        environment: What it was measured with.
    """

    setting: Setting
    results: tuple[Result, ...]
    trials: tuple[Trial, ...] = field(repr=False)
    samples: tuple[int, int]
    parameters: int
    steps: Steps
    environment: dict[str, str]

    @property
    def verdict(self) -> str:
        """The outcome in a sentence that agrees with the figures."""
        return verdict(self)

    @property
    def is_finite(self) -> bool:
        """Whether every variant trained without losses or weights that are no numbers."""
        return all(result.is_finite for result in self.results)

    @property
    def title(self) -> str:
        """What was trained, and with what, in a line."""
        fewest, most = self.samples
        setting = self.setting
        parts = [
            f"{setting.workload.name} ({self.parameters:,} parameters)",
            f"{setting.optimizer} at lr {self.results[0].learning_rate:g}",
            f"batch {fewest}" if fewest == most else f"batches of {fewest} to {most}",
            self.dtype,
            *([f"clipped to {setting.max_norm:g}"] if setting.max_norm is not None else []),
            self.environment["device"],
        ]
        return ", ".join(parts)

    @property
    def dtype(self) -> str:
        """The name of what it computes in."""
        return str(self.setting.dtype).removeprefix("torch.")

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "verdict": self.verdict,
            "model": self.setting.workload.name,
            "parameters": self.parameters,
            "optimizer": self.setting.optimizer,
            "learning_rate": self.results[0].learning_rate,
            "batch": self.samples[1],
            "smallest_batch": self.samples[0],
            "device": str(self.setting.device),
            "dtype": self.dtype,
            "max_norm": self.setting.max_norm,
            "steps": {"settling": self.steps.settling, "timed": self.steps.timed, "recorded": self.steps.recorded},
            "environment": self.environment,
            "results": [result.as_dict() for result in self.results],
        }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
