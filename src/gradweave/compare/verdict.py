"""The outcome of a comparison in one sentence, which says no more than the table bears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gradweave.compare.variants import OTHER_RULES, STOCK, WHOLE, WOVEN

if TYPE_CHECKING:
    from gradweave.compare.results import Comparison, Result

_SAME_NOISE = 4.0
"""Where two stock runs differ, how many times as much a woven one may differ before it counts as wrong."""
_ROUNDING = {True: 1e-4, False: 1e-2}
"""How far losses of a compiled step may be off in the first steps, in float32 and below."""


def verdict(comparison: Comparison) -> str:
    """What did not train right, if anything; else what is faster, and how near each row's training is."""
    baseline, again, *others = comparison.results
    broken = [result for result in others if not result.is_finite]
    wrong = [result for result in others if result.is_finite and not _trains_as_it_must(result, comparison)]
    clauses = [_broken(result) for result in broken]
    if wrong:
        distances = _listed([f"{result.label}: {_distance(result)}" for result in wrong])
        names = _listed([result.label for result in wrong])
        clauses.append(f"{names} did not train as {baseline.label} did: do not use it here ({distances})")
    sound = [result for result in others if result not in broken and result not in wrong]
    by_same_rule = [result for result in sound if result.label not in OTHER_RULES]
    other_rules = [result for result in sound if result.label in OTHER_RULES]
    if by_same_rule and not wrong:
        same_rule = " that trains by the same rule" if other_rules else ""
        clauses += [_speed(baseline, by_same_rule, same_rule=same_rule), _training(baseline, again, by_same_rule)]
    if other_rules:
        clauses.append(_other_rules(comparison, other_rules))
    clauses.append(f"two runs of {baseline.label} differed by {again.speedup}")
    return "; ".join(clauses) + "."


def _trains_as_it_must(result: Result, comparison: Comparison) -> bool:
    """Torch's own forms and other rules may train as they do; ours must train as the baseline does."""
    again = comparison.results[1]
    if result.label in WOVEN:
        return result.difference <= again.difference * _SAME_NOISE
    if result.label in WHOLE:
        rounding = _ROUNDING[comparison.setting.dtype is torch.float32]
        return result.loss_difference <= max(rounding, again.loss_difference * _SAME_NOISE)
    return True


def _distance(result: Result) -> str:
    if result.label in WHOLE:
        return f"first losses {result.loss_difference:.0e} off"
    return f"weights {result.difference:.0e} off"


def _broken(result: Result) -> str:
    step = result.first_broken_step
    what = "its weights are" if step is None else f"the loss of step {step} is"
    return f"{result.label} at lr {result.learning_rate:g} broke down: {what} not finite"


def _speed(baseline: Result, rows: Sequence[Result], *, same_rule: str) -> str:
    faster = sorted((r for r in rows if r.claim and r.speedup.value > 1), key=lambda r: -r.speedup.value)
    slower = [r for r in rows if r.claim and r.speedup.value < 1]
    behind = f"slower: {_listed([f'{r.label} {r.speedup.value:.3f}x' for r in slower])}" if slower else ""
    if not faster:
        missing = f"No mode{same_rule} is faster than {baseline.label} beyond the noise"
        return f"{missing} ({behind})" if behind else missing
    best, *next_ones = faster
    also = f"faster too: {_listed([f'{r.label} {r.speedup.value:.3f}x' for r in next_ones])}" if next_ones else ""
    more = "; ".join(part for part in (also, behind) if part)
    return f"{best.label} is {best.speedup} as fast as {baseline.label}" + (f" ({more})" if more else "")


def _training(baseline: Result, again: Result, rows: Sequence[Result]) -> str:
    """Which rows end with the baseline's weights, and how far off each other one is."""
    same = [result.label for result in rows if result.identical]
    if len(same) == len(rows) and again.identical:
        return f"{'all give' if len(rows) > 1 else 'it gives'} identical weights"
    parts = [f"identical weights: {_listed(same)}"] if same else []
    if not again.identical:
        parts.append(f"{baseline.label} run twice ends {again.difference:.0e} off itself")
    for result in rows:
        if not result.identical:
            owner = "torch's own " if result.label in (*STOCK, "hook") else ""
            parts.append(f"{owner}{result.label}: {_distance(result)}")
    return "; ".join(parts)


def _other_rules(comparison: Comparison, rows: Sequence[Result]) -> str:
    """Final losses beside each other; a fair contest would tune every learning rate, which this is not."""
    baseline = comparison.results[0]
    losses = [f"{r.label} {r.last_loss:.3g} (lr {r.learning_rate:g}, at {r.speedup} its speed)" for r in rows]
    return (
        f"after {len(baseline.losses)} steps {baseline.label} is at a loss of {baseline.last_loss:.3g} "
        f"({comparison.setting.optimizer}, lr {baseline.learning_rate:g}), by another rule {_listed(losses)}, all "
        "learning rates as given or by default and none tuned for this"
    )


def _listed(words: Sequence[str]) -> str:
    """As in "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else list(words))
