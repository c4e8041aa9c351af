"""The outcome of a comparison in one sentence, which claims no more than the figures show."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradweave.compare.results import Result
from gradweave.compare.trial import Setting
from gradweave.compare.variants import OTHER_RULES, STOCK, WHOLE, WOVEN

_MOST_TIMES_THE_NOISE = 4.0
"""Most by which a woven run may differ, in multiples of the difference of two stock runs."""
_ROUNDING = {True: 1e-4, False: 1e-2}
"""Largest relative difference of a whole step's first losses: in float32 (True), and in smaller types (False)."""


def verdict_clauses(results: Sequence[Result], setting: Setting) -> list[str]:
    """Return what a comparison shows, clause by clause.

    Rows that did not train as they must come first; without any, the faster rows and the distance of each training.

    Args:
        results: Results of all variants, the baseline first and the baseline again second.
        setting: The training that was compared.
    """
    baseline, again, *others = results
    broken = [result for result in others if not result.is_finite]
    wrong = [result for result in others if result.is_finite and not _trains_like_the_baseline(result, again, setting)]
    clauses = [_broken(result) for result in broken]
    if wrong:
        distances = _join_words([f"{result.label}: {_distance(result)}" for result in wrong])
        names = _join_words([result.label for result in wrong])
        clauses.append(f"{names} did not train as {baseline.label} did: do not use it here ({distances})")
    sound = [result for result in others if result not in broken and result not in wrong]
    by_same_rule = [result for result in sound if result.label not in OTHER_RULES]
    other_rules = [result for result in sound if result.label in OTHER_RULES]
    if by_same_rule and not wrong:
        same_rule = " that trains by the same rule" if other_rules else ""
        clauses += [_speed(baseline, by_same_rule, same_rule=same_rule), _training(baseline, again, by_same_rule)]
    if other_rules:
        clauses.append(_other_rules(baseline, other_rules, setting))
    clauses.append(f"two runs of {baseline.label} differed by {again.speedup}")
    return clauses


def _trains_like_the_baseline(result: Result, again: Result, setting: Setting) -> bool:
    """Return whether a row trains like the baseline, which is asked of gradweave's modes for the same rule only."""
    if result.label in WOVEN:
        return result.difference <= again.difference * _MOST_TIMES_THE_NOISE
    if result.label in WHOLE:
        rounding = _ROUNDING[setting.dtype is torch.float32]
        return result.loss_difference <= max(rounding, again.loss_difference * _MOST_TIMES_THE_NOISE)
    return True


def _distance(result: Result) -> str:
    """Return how far a training is off: by its losses for whole steps, else by its weights."""
    if result.label in WHOLE:
        return f"first losses {result.loss_difference:.0e} off"
    return f"weights {result.difference:.0e} off"


def _broken(result: Result) -> str:
    step = result.first_broken_step
    what = "its weights are" if step is None else f"the loss of step {step} is"
    return f"{result.label} at lr {result.learning_rate:g} broke down: {what} not finite"


def _speed(baseline: Result, rows: Sequence[Result], *, same_rule: str) -> str:
    """Return which rows are faster or slower than the baseline beyond the noise."""
    faster = sorted((r for r in rows if r.claim and r.speedup.value > 1), key=lambda r: -r.speedup.value)
    slower = [r for r in rows if r.claim and r.speedup.value < 1]
    losing = f"slower: {_join_words([f'{r.label} {r.speedup.value:.3f}x' for r in slower])}" if slower else ""
    if not faster:
        missing = f"No mode{same_rule} is faster than {baseline.label} beyond the noise"
        return f"{missing} ({losing})" if losing else missing
    best, *next_ones = faster
    also = f"faster too: {_join_words([f'{r.label} {r.speedup.value:.3f}x' for r in next_ones])}" if next_ones else ""
    more = "; ".join(part for part in (also, losing) if part)
    return f"{best.label} is {best.speedup} as fast as {baseline.label}" + (f" ({more})" if more else "")


def _training(baseline: Result, again: Result, rows: Sequence[Result]) -> str:
    """Return which rows end with the baseline's weights, and how far off each other one is."""
    same = [result.label for result in rows if result.identical]
    if len(same) == len(rows) and again.identical:
        return f"{'all give' if len(rows) > 1 else 'it gives'} identical weights"
    parts = [f"identical weights: {_join_words(same)}"] if same else []
    if not again.identical:
        parts.append(f"{baseline.label} run twice ends {again.difference:.0e} off itself")
    for result in rows:
        if not result.identical:
            owner = "torch's own " if result.label in (*STOCK, "hook") else ""
            parts.append(f"{owner}{result.label}: {_distance(result)}")
    return "; ".join(parts)


def _other_rules(baseline: Result, rows: Sequence[Result], setting: Setting) -> str:
    """Return the final losses; a fair contest would tune every learning rate, which this does not."""
    losses = [f"{r.label} {r.last_loss:.3g} (lr {r.learning_rate:g}, at {r.speedup} its speed)" for r in rows]
    return (
        f"after {len(baseline.losses)} steps {baseline.label} has a loss of {baseline.last_loss:.3g} "
        f"({setting.optimizer}, lr {baseline.learning_rate:g}) and, by another rule, {_join_words(losses)}; all "
        "learning rates are as given or by default, none was tuned for this"
    )


def _join_words(words: Sequence[str]) -> str:
    """Return words as in "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else list(words))
