"""A comparison: the results of all variants, with the verdict on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradweave.compare.results import Result
from gradweave.compare.trial import Setting, Trial
from gradweave.compare.verdict import verdict_clauses


@dataclass(frozen=True)
class Steps:
    """Numbers of steps that each variant takes: first to settle, then timed, then recorded part by part."""

    settling: int
    timed: int
    recorded: int

    @property
    def total(self) -> int:
        """Number of all steps; all of them train."""
        return self.settling + self.timed + self.recorded


@dataclass(frozen=True)
class Comparison:
    """Results of all variants, the baseline first and the baseline again second.

    Attributes:
        setting: The training that was compared.
        results: Results of each variant.
        trials: Trainings of each variant.
        samples: Fewest and most samples of a batch.
        parameters: Number of trained scalars.
        steps: Steps that each variant took.
        environment: Versions, device and date.
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
        """The outcome in a sentence."""
        return "; ".join(self.findings) + "."

    @property
    def findings(self) -> list[str]:
        """The clauses of the verdict, the most important first."""
        return verdict_clauses(self.results, self.setting)

    @property
    def is_finite(self) -> bool:
        """Whether all losses and weights of every variant are finite."""
        return all(result.is_finite for result in self.results)

    @property
    def title(self) -> str:
        """The training in a line: model, optimizer, batch, type and device."""
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
        """Name of the floating-point type."""
        return str(self.setting.dtype).removeprefix("torch.")

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, for JSON."""
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
