"""Running variants in turn and judging them."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import mean, median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradweave
from gradweave.compare.statistics import Ratio, is_claim, paired_ratio, percentiles
from gradweave.compare.trial import PARTS, Setting, Trial
from gradweave.compare.variants import DESCRIPTIONS, MODES, OTHER_RULES, WHOLE, WOVEN, baseline_of
from gradweave.errors import ArgumentError

BLOCK_STEPS = 5
RECORDED_STEPS = 6
_SETTLING_STEPS = 60
"""Enough for ``auto`` and ``reorder`` to observe, measure and choose before timing begins."""
_DETERMINISTIC_STEPS = 10
_SAME_NOISE = 4.0
"""Where two stock runs differ, how many times as much a woven one may differ before it counts as wrong."""
_ROUNDING = {True: 1e-4, False: 1e-2}
"""How far losses of a compiled step may be off in the first steps, in float32 and below."""
AGAIN = " (again)"


@dataclass(frozen=True)
class Result:
    """What was measured of one variant.

    Attributes:
        label: Its name.
        description: What it does.
        milliseconds: 20th, 50th and 80th percentile per step.
        parts: The same for forward, backward and update, of recorded steps.
        throughput: Samples per second.
        peak_bytes: Most GPU memory; None on the CPU.
        speedup: Against the baseline, of rounds in which both ran.
        claim: Whether the speed-up is beyond the difference of two equal variants.
        difference: Largest difference of any weight from the baseline's after the same training; on a
            GPU, after a short one with deterministic kernels.
        loss_difference: Largest relative difference of a loss from the baseline's, in the first steps.
        losses: Of every step.
    """

    label: str
    description: str
    milliseconds: tuple[float, float, float]
    parts: dict[str, tuple[float, float, float]]
    throughput: float
    peak_bytes: int | None
    speedup: Ratio
    claim: bool
    difference: float
    loss_difference: float
    losses: list[float] = field(repr=False)

    @property
    def sameness(self) -> str:
        """How near its training is to the baseline's, in a word or two."""
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
        return mean(self.losses[-BLOCK_STEPS:])

    @property
    def identical(self) -> bool:
        """Whether every weight is the baseline's, bit for bit."""
        return self.difference == 0.0


@dataclass(frozen=True)
class Comparison:
    """Results of all variants, the baseline first and the baseline again second."""

    setting: Setting
    results: tuple[Result, ...]
    trials: tuple[Trial, ...] = field(repr=False)
    environment: dict[str, str]

    @property
    def verdict(self) -> str:
        """The outcome in a sentence, and one more about what trains by another rule."""
        baseline, others = self.results[0], [result for result in self.results if result.label in OTHER_RULES]
        if not others:
            return self._judged()
        losses = ", ".join(f"{result.label} {result.last_loss:.3g}" for result in others)
        return (
            f"{self._judged()} After as many steps {baseline.label} is at a loss of {baseline.last_loss:.3g}; by "
            f"another rule, with defaults: {losses}."
        )

    def _judged(self) -> str:
        baseline, again, *others = self.results
        woven = [result for result in others if result.label in (*WOVEN, *WHOLE)]
        noise = f"two runs of {baseline.label} differed by {again.speedup}"
        different = [result.label for result in woven if not self._trains_the_same(result)]
        if different:
            names = ", ".join(different)
            return f"{names} did not train as {baseline.label} did: do not use it here; {noise}."
        same = "identical weights"
        if again.difference > 0:
            same = f"weights as near to it as its own from run to run ({again.difference:.1g})"
        same += "".join(f" ({r.label}: losses to {r.loss_difference:.0e})" for r in woven if r.label in WHOLE)
        faster = [result for result in woven if result.claim and result.speedup.value > 1]
        if not woven:
            best = max(others, key=lambda result: result.speedup.value, default=again)
            return f"{best.label} ran at {best.speedup} of {baseline.label}; {noise}."
        if not faster:
            return f"No mode is faster than {baseline.label} beyond the noise, and all give {same}; {noise}."
        best = max(faster, key=lambda result: result.speedup.value)
        if best.label in WHOLE:
            same = f"its first losses to {best.loss_difference:.0e}"
        return f"{best.label} is {best.speedup} as fast as {baseline.label}, with {same}; {noise}."

    def _trains_the_same(self, result: Result) -> bool:
        again = self.results[1]
        if result.label in WOVEN:
            return result.difference <= again.difference * _SAME_NOISE
        rounding = _ROUNDING[self.setting.dtype is torch.float32]
        return result.loss_difference <= max(rounding, again.loss_difference * _SAME_NOISE)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "verdict": self.verdict,
            "model": self.setting.workload.name,
            "optimizer": self.setting.optimizer,
            "batch": self.setting.batch,
            "device": str(self.setting.device),
            "dtype": str(self.setting.dtype).removeprefix("torch."),
            "max_norm": self.setting.max_norm,
            "environment": self.environment,
            "results": [_result_dict(result) for result in self.results],
        }


def _result_dict(result: Result) -> dict[str, Any]:
    return {
        "mode": result.label,
        "description": result.description,
        "milliseconds_per_step": result.milliseconds,
        "parts_milliseconds": result.parts,
        "samples_per_second": result.throughput,
        "peak_bytes": result.peak_bytes,
        "speedup": result.speedup.value,
        "speedup_interval": [result.speedup.low, result.speedup.high],
        "claim": result.claim,
        "identical": result.identical,
        "largest_difference": result.difference,
        "largest_relative_loss_difference": result.loss_difference,
        "losses": result.losses,
    }


def compare(
    setting: Setting, modes: Sequence[str], *, steps: int, progress: Callable[[str, float], None] = lambda *_: None
) -> Comparison:
    """Trains the same model from the same seed in every mode, taking turns, and compares.

    Args:
        setting: What is trained, and how.
        modes: Of :data:`MODES`; the form a user would pick today is added as the baseline.
        steps: Timed steps of each mode.
        progress: Told what is going on, and the share that is done.
    """
    for mode in modes:
        if mode not in MODES:
            raise ArgumentError("--modes", mode, f"use one or more of {', '.join(MODES)}")
        if mode in ("hook", "backward") and setting.max_norm is not None:
            raise ArgumentError("--modes", mode, "cannot clip by norm; leave out --max-norm, or this mode")
    if steps < 4 * BLOCK_STEPS:
        raise ArgumentError("--steps", steps, f"give at least {4 * BLOCK_STEPS}, for an interval to mean something")
    baseline = baseline_of(setting.optimizer)
    batches = make_batches(setting)
    labels = [(baseline, baseline), (baseline + AGAIN, baseline)]
    labels += [(mode, mode) for mode in dict.fromkeys(modes) if mode != baseline]
    trials = [Trial(label, mode, setting) for label, mode in labels]
    settling = _SETTLING_STEPS if {"auto", "reorder"} & set(modes) else 2 * BLOCK_STEPS
    rounds = -(-steps // BLOCK_STEPS)
    total = len(trials) * (settling + rounds * BLOCK_STEPS + RECORDED_STEPS)
    done = 0

    def advance(doing: str, count: int) -> None:
        nonlocal done
        done += count
        progress(doing, done / total)

    for trial in trials:
        progress(f"warming up {trial.label}", done / total)
        trial.run_block(batches, settling, timed=False)
        advance(f"warming up {trial.label}", settling)
    for number in range(rounds):
        turn = number % len(trials)
        for trial in (*trials[turn:], *trials[:turn]):
            trial.run_block(batches, BLOCK_STEPS, timed=True)
            advance(f"round {number + 1} of {rounds}", BLOCK_STEPS)
    for trial in trials:
        trial.record(batches, RECORDED_STEPS)
        advance(f"recording {trial.label}", RECORDED_STEPS)
    explained = [trial.variant.explain() for trial in trials]
    for trial in trials:
        trial.finish()
    compared = trials if setting.device.type == "cpu" else _train_deterministically(labels, setting, batches)
    differences = [_largest_difference(compared[0], trial) for trial in compared]
    return Comparison(setting, _judge(trials, explained, differences), tuple(trials), environment(setting.device))


def _train_deterministically(
    labels: Sequence[tuple[str, str]], setting: Setting, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[Trial]:
    """A short training of every variant with kernels that give the same result each time.

    A GPU's fastest kernels do not, so that two runs of one variant differ.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            trials = [Trial(label, mode, setting) for label, mode in labels]
            for trial in trials:
                trial.run_block(batches, _DETERMINISTIC_STEPS, timed=False)
                trial.finish()
        return trials
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def make_batches(setting: Setting) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches that every variant trains on, in turn."""
    if setting.batch < 1:
        raise ArgumentError("--batch", setting.batch, "give at least 1 sample")
    generator = torch.Generator().manual_seed(setting.seed)
    made = setting.workload.make_data(setting.batch, generator)
    return [(x.to(setting.device), y.to(setting.device)) for x, y in made]


def _judge(trials: Sequence[Trial], explained: Sequence[str], differences: Sequence[float]) -> tuple[Result, ...]:
    first, again = trials[0], trials[1]
    same = paired_ratio(first.blocks, again.blocks)
    results = []
    for trial, text, difference in zip(trials, explained, differences, strict=True):
        speedup = paired_ratio(first.blocks, trial.blocks)
        results.append(
            Result(
                label=trial.label,
                description=text if trial.mode in WOVEN else DESCRIPTIONS[trial.mode],
                milliseconds=percentiles([1e3 * seconds for seconds in trial.blocks]),
                parts={part: percentiles(trial.parts[part]) for part in PARTS if trial.parts[part]},
                throughput=trial.setting.batch / median(trial.blocks),
                peak_bytes=trial.peak_bytes,
                speedup=speedup,
                claim=trial is not first and trial is not again and is_claim(speedup, same),
                difference=difference,
                loss_difference=_loss_difference(first, trial),
                losses=trial.losses,
            )
        )
    return tuple(results)


def _loss_difference(one: Trial, other: Trial) -> float:
    pairs = zip(one.losses[:_DETERMINISTIC_STEPS], other.losses[:_DETERMINISTIC_STEPS], strict=True)
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)


def _largest_difference(one: Trial, other: Trial) -> float:
    largest = 0.0
    for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        if not torch.equal(a, b):
            gap = float((a.double() - b.double()).abs().max())
            largest = max(largest, gap if gap > 0 else float("inf"))
    return largest


def environment(device: torch.device) -> dict[str, str]:
    """What the figures were measured with."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "gradweave": gradweave.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
