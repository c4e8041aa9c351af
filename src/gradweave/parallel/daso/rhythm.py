"""The rhythm of exchanges: steps from one to the next, and until the merge, adapted to measured times.

Pure data: every rank feeds in the same agreed figures, and so arrives at the same decision.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from gradweave.parallel.daso.options import PAPER_EPOCHS, PAPER_MOST_EVERY, Options

_FIRST = 4
"""Steps between exchanges, and until a merge, before anything has been measured."""
_KEEP = 0.25
"""Fraction of a step by which a transfer must fall below the next whole step before waiting is shortened."""
_MOST_EVERY = 256
"""Most steps between exchanges, and until a merge, in any case."""
_MOST_UNASKED = 16
"""Most steps between exchanges, and until a merge, that measured times alone lead to: steps that nodes take apart for
longer may be worth less, and on a busy machine a transfer takes longer the more time it is given."""
_SPARE = 0.2
"""Steps to wait beyond the usual duration of a transfer, since some take longer."""
_STALL = 4.0
"""Multiple of the usual duration at which a transfer is cut off in the average: a stall, not the network."""
_MOST_WORK = 0.05
"""Most of a step, as a fraction, that the work of exchanges may take; beyond it they become rarer."""
_BETTER = 0.95
"""A loss counts as progress if it is below this fraction of the best."""
_PATIENCE = 2
"""Values without progress that are tolerated."""


class Phase(StrEnum):
    """A way for nodes to keep their weights together."""

    TOGETHER = "together"
    """They average in every step: warm-up and cool-down."""
    APART = "apart"
    """They exchange weights now and then, in the background."""


@dataclass(frozen=True)
class Figures:
    """Measurements that nodes agree on at an exchange; not a number where nothing was measured.

    Attributes:
        seconds: Duration of the transfer and of the vote on it.
        compute: Seconds of a step, without waiting for other nodes.
        loss: Mean over the nodes.
        lr: Learning rate.
        work: Seconds of packing and merging, which an exchange takes from the step even if training does not wait.
    """

    seconds: float = math.nan
    compute: float = math.nan
    loss: float = math.nan
    lr: float = math.nan
    work: float = math.nan


NOTHING_MEASURED = Figures()


@dataclass
class Plateau:
    """Detector of a loss that no longer falls: more than two values without progress since the last with it."""

    best: float = math.inf
    bad: int = 0

    def see(self, loss: float) -> bool:
        """Add a value; return whether this is a plateau."""
        if math.isnan(loss):
            return False
        if loss < self.best * _BETTER:
            self.best, self.bad = loss, 0
            return False
        self.bad += 1
        if self.bad <= _PATIENCE:
            return False
        self.bad = 0
        return True


@dataclass
class Rhythm:
    """The default rhythm, of hidden transfers: wait as many steps as one takes, and exchange as often as that allows.

    Attributes:
        every: Steps from one exchange to the next.
        wait: Steps from an exchange to its merge.
        changes: History of (first exchange, ``every``, ``wait``): the record that replays a run.
        plateau: Detector for ``pace="plateau"``.
        ratio: Running average of a transfer's duration, in steps.
        work: Running average of an exchange's work, in steps.
        waits: Steps that a transfer takes if these are more than ``wait`` may become, so that training waits; else 0.
        peak_lr: Highest learning rate so far, for ``pace="lr"``.
        slack: Factor on the distance between exchanges, for ``pace="plateau"``.
        epoch: Epochs so far, by the published rules.
    """

    options: Options
    every: int = 0
    wait: int = 0
    changes: list[tuple[int, int, int]] = field(default_factory=list)
    plateau: Plateau = field(default_factory=Plateau)
    ratio: float = math.nan
    work: float = math.nan
    waits: int = 0
    peak_lr: float = 0.0
    slack: int = 1
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.every:
            return
        given = self.options
        if given.rhythm:
            self._change(*given.rhythm[0])
            return
        every = given.every if given.every is not None else max(_FIRST, given.wait or 0)
        wait = given.wait if given.wait is not None else min(every, _FIRST)
        self.slack = _FIRST if given.pace == "plateau" else 1
        self._change(0, every, wait)

    def phase(self, step: int) -> Phase:
        """Return the phase of a step."""
        given = self.options
        cool = given.total is not None and step >= given.total - (given.cool_down or 0)
        return Phase.TOGETHER if step < (given.warm_up or 0) or cool else Phase.APART

    def last_step_apart(self, step: int) -> int | None:
        """Return the last step before the cool-down; the present one if nodes are together, None if there is no end."""
        if self.phase(step) is Phase.TOGETHER:
            return step
        given = self.options
        return None if given.total is None else given.total - (given.cool_down or 0) - 1

    def merged(self, number: int, figures: Figures) -> None:
        """Adapt to the figures agreed at exchange ``number``; a change applies from the next one on."""
        given = self.options
        if given.rhythm is not None:
            for change in given.rhythm:
                if change[0] == number + 1:
                    self._change(*change)
            return
        wait = given.wait if given.wait is not None else self._steps_of_transfer(figures)
        if given.every is None:
            self._change(number + 1, self._spread(max(wait, self._steps_of_work(figures), 1), figures), wait)
        else:
            self._change(number + 1, given.every, min(wait, given.every))

    def _steps_of_transfer(self, figures: Figures) -> int:
        """Return the whole steps that a transfer takes; fewer than now only if it is clearly faster."""
        if not figures.compute > 0:
            return self.wait
        given, now = self.options, figures.seconds / figures.compute
        self.ratio = now if math.isnan(self.ratio) else (self.ratio + min(now, _STALL * max(self.ratio, 1.0))) / 2
        needed = self.ratio + _SPARE
        if self.wait - 1 - _KEEP < needed <= self.wait and self.changes[-1][0] > 0:
            self.waits = 0
            return self.wait
        steps, most = max(1, math.ceil(needed)), _MOST_UNASKED if given.every is None else _MOST_EVERY
        self.waits = steps if steps > most else 0
        return min(most, steps)

    def _steps_of_work(self, figures: Figures) -> int:
        """Return the steps that the work of an exchange must be spread over."""
        share = figures.work / figures.compute if figures.compute > 0 else math.nan
        if math.isnan(share):
            return 1
        self.work = share if math.isnan(self.work) else (self.work + share) / 2
        needed = self.work / _MOST_WORK
        now = min(self.every, _MOST_UNASKED)
        return now if now - 1 - _KEEP < needed <= now else min(_MOST_UNASKED, math.ceil(needed))

    def _spread(self, least: int, figures: Figures) -> int:
        """Return the steps between exchanges, at least as many as a transfer takes."""
        if self.options.pace == "lr" and figures.lr > 0:
            self.peak_lr = max(self.peak_lr, figures.lr)
            return max(least, min(_MOST_EVERY, round(least * (self.peak_lr / figures.lr) ** 2)))
        if self.options.pace == "plateau" and self.plateau.see(figures.loss):
            self.slack = self.slack // 2 or _FIRST
        return least * max(1, self.slack)

    def _change(self, number: int, every: int, wait: int) -> None:
        if (every, wait) != (self.every, self.wait):
            self.every, self.wait = every, wait
            self.changes.append((number, every, wait))

    def epoch_ended(self, number: int, figures: Figures) -> None:
        """Adapt to the figures agreed at the end of an epoch; only the published rules do."""

    def state(self) -> dict[str, Any]:
        """Return everything that the options do not determine, for a checkpoint."""
        state = asdict(self)
        del state["options"]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        for name, value in state.items():
            setattr(self, name, value)
        self.plateau = Plateau(**state["plateau"])
        self.changes = [tuple(change) for change in state["changes"]]


@dataclass
class PaperRhythm(Rhythm):
    """The published rhythm: averages in every step of the first and last epochs; in between, halved at each plateau."""

    def __post_init__(self) -> None:
        if not self.every:
            self._change(0, 4, 1)

    def phase(self, step: int) -> Phase:
        """Return the phase of the present epoch, whichever the step."""
        del step
        given = self.options
        warm_up = PAPER_EPOCHS if given.warm_up is None else given.warm_up
        cool_down = PAPER_EPOCHS if given.cool_down is None else given.cool_down
        cool = given.total is not None and self.epoch >= given.total - cool_down
        return Phase.TOGETHER if self.epoch < warm_up or cool else Phase.APART

    def merged(self, number: int, figures: Figures) -> None:
        """Do nothing: the rhythm does not change within an epoch."""

    def epoch_ended(self, number: int, figures: Figures) -> None:
        """Halve the distance on a plateau, or start again from the greatest if it is 1 already."""
        apart = self.phase(0) is Phase.APART
        self.epoch += 1
        if not apart or not self.plateau.see(figures.loss):
            return
        most = self.options.every or PAPER_MOST_EVERY
        if self.every > 1:
            self._change(number + 1, self.every // 2, max(1, self.wait - 1))
        else:
            self._change(number + 1, most, max(1, most // 4))
