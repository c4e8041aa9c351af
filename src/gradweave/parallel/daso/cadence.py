"""When nodes exchange weights and when they merge them: every so many steps, changed by what is measured.

Pure data: each rank feeds the same agreed figures in and so comes to the same decision.
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
"""How far below the next whole step a transfer must fall before waiting is shortened."""
_MOST_EVERY = 256
_MOST_UNASKED = 16
"""Steps between exchanges, and until a merge, that measured times alone lead to: what nodes do apart for longer may be
worth less, and on a busy machine transfers seem longer the longer they are given."""
_SPARE = 0.2
"""Steps more than a transfer takes as a rule, since some take longer."""
_STALL = 4.0
_MOST_WORK = 0.05
"""Share of a step that exchanges may take by the work they are, which being rarer makes up for."""
_BETTER = 0.95
"""A loss counts as progress if it is below this share of the best."""
_PATIENCE = 2


class Phase(StrEnum):
    """What nodes do to stay together."""

    TOGETHER = "together"
    """Average in every step: warm-up and cool-down."""
    APART = "apart"
    """Exchange now and then, in the background."""


@dataclass(frozen=True)
class Figures:
    """What nodes have agreed on at an exchange.

    Attributes:
        seconds: Of the transfer and the vote on it.
        compute: Seconds of a step, without waiting for other nodes.
        loss: Mean over the nodes, or not a number.
        lr: Learning rate.
        work: Seconds that an exchange takes from the step, even if nobody waits for it: packing and merging.
    """

    seconds: float = math.nan
    compute: float = math.nan
    loss: float = math.nan
    lr: float = math.nan
    work: float = math.nan


NOTHING_MEASURED = Figures()


@dataclass
class Plateau:
    """Notices when a loss has stopped falling: more than two bad values since the last good one."""

    best: float = math.inf
    bad: int = 0

    def see(self, loss: float) -> bool:
        """Takes a value; says whether this is a plateau."""
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
    """Exchanges that take no time: as many steps of waiting as a transfer lasts, and no more between two than that.

    Attributes:
        every: Steps from one exchange to the next.
        wait: Steps from an exchange to its merge.
        changes: Exchange from which on, ``every`` and ``wait``: the record that replays a run.
        waits: Steps that a transfer takes, where they are more than is waited unasked; training then stands still.
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
        """What is done in a step."""
        given = self.options
        cool = given.total is not None and step >= given.total - (given.cool_down or 0)
        return Phase.TOGETHER if step < (given.warm_up or 0) or cool else Phase.APART

    def next_border(self, step: int) -> int | None:
        """The last step before the cool-down, if that is still to come; the present one in any other phase."""
        if self.phase(step) is Phase.TOGETHER:
            return step
        given = self.options
        return None if given.total is None else given.total - (given.cool_down or 0) - 1

    def merged(self, number: int, figures: Figures) -> None:
        """Takes what was agreed at exchange ``number``; what is decided holds from the next one on."""
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
        """Whole steps that the transfer takes; fewer than now only if clearly so."""
        if not figures.compute > 0:
            return self.wait
        given, now = self.options, figures.seconds / figures.compute
        # One that took many times as long as usual is a stall, not the network.
        self.ratio = now if math.isnan(self.ratio) else (self.ratio + min(now, _STALL * max(self.ratio, 1.0))) / 2
        needed = self.ratio + _SPARE
        if self.wait - 1 - _KEEP < needed <= self.wait and self.changes[-1][0] > 0:
            self.waits = 0
            return self.wait
        steps, most = max(1, math.ceil(needed)), _MOST_UNASKED if given.every is None else _MOST_EVERY
        self.waits = steps if steps > most else 0
        return min(most, steps)

    def _steps_of_work(self, figures: Figures) -> int:
        """Steps among which the work of an exchange is to be spread."""
        share = figures.work / figures.compute if figures.compute > 0 else math.nan
        if math.isnan(share):
            return 1
        self.work = share if math.isnan(self.work) else (self.work + share) / 2
        needed = self.work / _MOST_WORK
        now = min(self.every, _MOST_UNASKED)
        return now if now - 1 - _KEEP < needed <= now else min(_MOST_UNASKED, math.ceil(needed))

    def _spread(self, least: int, figures: Figures) -> int:
        """Steps between exchanges, at least as many as a transfer takes."""
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
        """Told of the end of an epoch; only the published rules ask."""

    def state(self) -> dict[str, Any]:
        """All that is not given by the options."""
        state = asdict(self)
        del state["options"]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state` gave."""
        for name, value in state.items():
            setattr(self, name, value)
        self.plateau = Plateau(**state["plateau"])
        self.changes = [tuple(change) for change in state["changes"]]


@dataclass
class PaperRhythm(Rhythm):
    """As published: averages in every step of the first and last epochs; in between, halved at each plateau."""

    def __post_init__(self) -> None:
        if not self.every:
            self._change(0, 4, 1)

    def phase(self, step: int) -> Phase:
        """By epoch, not by step."""
        del step
        given = self.options
        warm_up = PAPER_EPOCHS if given.warm_up is None else given.warm_up
        cool_down = PAPER_EPOCHS if given.cool_down is None else given.cool_down
        cool = given.total is not None and self.epoch >= given.total - cool_down
        return Phase.TOGETHER if self.epoch < warm_up or cool else Phase.APART

    def merged(self, number: int, figures: Figures) -> None:
        """Nothing changes within an epoch."""

    def epoch_ended(self, number: int, figures: Figures) -> None:
        """Halves the distance on a plateau, and starts again from the greatest where it is 1 already."""
        apart = self.phase(0) is Phase.APART
        self.epoch += 1
        if not apart or not self.plateau.see(figures.loss):
            return
        most = self.options.every or PAPER_MOST_EVERY
        if self.every > 1:
            self._change(number + 1, self.every // 2, max(1, self.wait - 1))
        else:
            self._change(number + 1, most, max(1, most // 4))
