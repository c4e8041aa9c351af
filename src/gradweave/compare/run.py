"""Variants of a training that take turns and are measured."""

from __future__ import annotations

import math
import platform
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from statistics import mean, median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradweave
from gradweave.compare.comparison import Comparison, Steps
from gradweave.compare.model_errors import errors_of_model
from gradweave.compare.results import Result
from gradweave.compare.statistics import is_claim, paired_ratio, percentiles
from gradweave.compare.trial import PARTS, Setting, Trial
from gradweave.compare.variants import DESCRIPTIONS, MODES, OTHER_RULES, WOVEN, Mode, baseline_of
from gradweave.compare.workloads import Batches
from gradweave.errors import ArgumentError, GradweaveError

BLOCK_STEPS = 5
RECORDED_STEPS = 6
_SETTLING_STEPS = 60
"""Steps in which ``auto`` and ``reorder`` observe, measure and choose before timing begins."""
_DETERMINISTIC_STEPS = 10
AGAIN = " (again)"
"""Suffix of the baseline's second row, which shows how much two equal trainings differ."""

Progress = Callable[[str, float], None]


def compare(setting: Setting, modes: Sequence[Mode], *, steps: int, progress: Progress = lambda *_: None) -> Comparison:
    """Train the same model from the same seed in every mode, taking turns, and compare.

    Args:
        setting: The training.
        modes: Modes of :data:`MODES`; the form of the optimizer that a user would pick today is added as the baseline.
        steps: Timed steps of each mode.
        progress: Called with the current activity and the share that is done.
    """
    _check(setting, modes, steps)
    baseline = baseline_of(setting.optimizer)
    batches = make_batches(setting)
    labels: list[tuple[str, Mode]] = [(baseline, baseline), (baseline + AGAIN, baseline)]
    labels += [(mode, mode) for mode in dict.fromkeys(modes) if mode != baseline]
    settling = _SETTLING_STEPS if {"auto", "reorder"} & set(modes) else 2 * BLOCK_STEPS
    rounds = -(-steps // BLOCK_STEPS)
    each = Steps(settling, rounds * BLOCK_STEPS, RECORDED_STEPS)
    total, done = len(labels) * each.total, 0

    def advance(doing: str, count: int) -> None:
        nonlocal done
        done += count
        progress(doing, done / total)

    trials = []
    for label, mode in labels:
        progress("building models", 0.0)
        trials.append(Trial(label, mode, setting))
    first = trials[0]
    parameters = sum(p.numel() for p in first.model.parameters() if p.requires_grad)
    for trial in trials:
        doing = f"warming up {trial.label}{', which compiles first' if trial.mode == 'compile' else ''}"
        advance(doing, 0)
        trial.run_block(batches, settling, timed=False, advance=partial(advance, doing))
        _check_baseline(first)
    for number in range(rounds):
        turn = number % len(trials)
        # Each round begins with another variant, so that a place in the round favours none of them.
        for trial in (*trials[turn:], *trials[:turn]):
            doing = f"round {number + 1} of {rounds}"
            trial.run_block(batches, BLOCK_STEPS, timed=True, advance=partial(advance, doing))
        _check_baseline(first)
    for trial in trials:
        trial.record(batches, RECORDED_STEPS)
        advance("recording", RECORDED_STEPS)
    explained = [trial.variant.explain() for trial in trials]
    for trial in trials:
        trial.finish()
    _check_baseline(first, weights=True)
    if setting.device.type == "cpu":
        compared = trials
    else:
        progress("comparing weights", 1.0)
        compared = _train_deterministically(labels, setting, batches)
    differences = [_largest_difference(compared[0], trial) for trial in compared]
    sizes = [_samples(batch, setting) for batch in batches]
    results = _results(trials, explained, differences, mean(sizes))
    samples = min(sizes), max(sizes)
    return Comparison(setting, results, tuple(trials), samples, parameters, each, environment(setting.device))


def _check(setting: Setting, modes: Sequence[str], steps: int) -> None:
    for mode in modes:
        if mode not in MODES:
            raise ArgumentError("--modes", mode, f"use one or more of {', '.join(MODES)}")
        if mode in ("hook", "backward") and setting.max_norm is not None:
            raise ArgumentError(
                "--modes",
                mode,
                "updates before all gradients are known and cannot clip by norm; leave out --max-norm, or this mode",
            )
    for name, value in (("--max-norm", setting.max_norm), ("--lr", setting.lr), ("--eva-lr", setting.other_lr)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ArgumentError(name, value, "give a number above 0")
    if setting.other_lr is not None and not set(modes) & OTHER_RULES.keys():
        raise ArgumentError("--eva-lr", setting.other_lr, f"is for {', '.join(OTHER_RULES)}; add one to --modes")
    if steps < 4 * BLOCK_STEPS:
        raise ArgumentError(
            "--steps", steps, f"give at least {4 * BLOCK_STEPS}: fewer rounds give no meaningful interval"
        )


def _check_baseline(baseline: Trial, *, weights: bool = False) -> None:
    """Raise GradweaveError if the baseline is not finite: there is nothing to compare with, and no use in going on."""
    setting, rate = baseline.setting, baseline.variant.learning_rate
    where = f"model={setting.workload.name!r} with {setting.optimizer} at lr {rate:g}"
    remedy = "nothing can be compared; give a lower --lr, or look at the model and its data"
    for number, loss in enumerate(baseline.losses, 1):
        if not math.isfinite(loss):
            raise GradweaveError(f"{where}: the loss of step {number} of stock training is {loss}: {remedy}")
    if weights and not baseline.is_finite:
        raise GradweaveError(f"{where}: stock training ends with weights that are not finite: {remedy}")


def _train_deterministically(labels: Sequence[tuple[str, Mode]], setting: Setting, batches: Batches) -> list[Trial]:
    """Return short trainings of every variant with kernels that give the same result each time.

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


def make_batches(setting: Setting) -> Batches:
    """Return the batches that every variant trains on, in turn."""
    if setting.batch < 1:
        raise ArgumentError("--batch", setting.batch, "give at least 1 sample")
    generator = torch.Generator().manual_seed(setting.seed)
    name = setting.workload.name
    with errors_of_model(name, "its data cannot be made"):
        stored = setting.workload.make_data(setting.batch, generator)
        made = [(x.to(setting.device), y.to(setting.device)) for x, y in stored]
    if not made:
        raise ArgumentError("model", name, f"makes no batch of {setting.batch} samples; give a smaller --batch")
    return made


def _samples(batch: tuple[torch.Tensor, torch.Tensor], setting: Setting) -> int:
    """Return the number of samples that a batch really has, which need not be the number asked for."""
    x = batch[0]
    return len(x) if isinstance(x, torch.Tensor) and x.dim() else setting.batch


def _results(
    trials: Sequence[Trial], explained: Sequence[str], differences: Sequence[float], samples: float
) -> tuple[Result, ...]:
    """Return the result of each trial, its first one being the baseline and its second one the baseline again."""
    first, again = trials[0], trials[1]
    same = paired_ratio(first.blocks, again.blocks)
    results = []
    for trial, text, difference in zip(trials, explained, differences, strict=True):
        speedup = paired_ratio(first.blocks, trial.blocks)
        results.append(
            Result(
                label=trial.label,
                description=text if trial.mode in WOVEN else DESCRIPTIONS[trial.mode],
                learning_rate=trial.variant.learning_rate,
                milliseconds=percentiles([1e3 * seconds for seconds in trial.blocks]),
                parts={part: percentiles(trial.parts[part]) for part in PARTS if trial.parts[part]},
                throughput=samples / median(trial.blocks),
                peak_bytes=trial.peak_bytes,
                speedup=speedup,
                claim=trial is not first and trial is not again and is_claim(speedup, same),
                difference=difference,
                loss_difference=_loss_difference(first, trial),
                is_finite=trial.is_finite,
                losses=trial.losses,
            )
        )
    return tuple(results)


def _loss_difference(one: Trial, other: Trial) -> float:
    """Return the largest relative difference of the first losses; infinite if one is not finite."""
    pairs = zip(one.losses[:_DETERMINISTIC_STEPS], other.losses[:_DETERMINISTIC_STEPS], strict=True)
    gaps = [abs(a - b) / max(abs(a), 1e-12) for a, b in pairs]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


def _largest_difference(one: Trial, another: Trial) -> float:
    """Return the largest difference of any weight or buffer; infinite where one is a number and the other is not."""
    largest = 0.0
    for a, b in zip(one.model.state_dict().values(), another.model.state_dict().values(), strict=True):
        if not torch.equal(a, b):
            numbers = [torch.view_as_real(t) if t.is_complex() else t for t in (a, b)]
            gaps = (numbers[0].double() - numbers[1].double()).abs()
            other = gaps[(numbers[0] != numbers[1]) & ~(numbers[0].isnan() & numbers[1].isnan())]
            gap = float(other.max()) if other.numel() else 0.0
            largest = max(largest, math.inf if math.isnan(gap) else gap)
    return largest


def environment(device: torch.device) -> dict[str, str]:
    """Return versions, device and date of a measurement."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        threads = torch.get_num_threads()
        name = f"{platform.processor() or platform.machine()}, {threads} thread{'' if threads == 1 else 's'}"
    return {
        "gradweave": gradweave.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
