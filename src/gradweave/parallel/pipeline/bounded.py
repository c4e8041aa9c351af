"""Fast-forwarding within a bound of bytes: weight gradients fill gaps, and go first where memory runs out."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from gradweave._compat.pipelining import Action
from gradweave.errors import ScheduleError
from gradweave.schedule.costs import LayerCost
from gradweave.schedule.links import Link


@dataclass(frozen=True)
class StageBytes:
    """What one stage keeps alive for one micro-batch.

    Attributes:
        activations: From F until W.
        gradients: From X until W.
    """

    activations: int
    gradients: int


@dataclass(frozen=True)
class Patience:
    """How many weight gradients a rank lets wait before one of them goes ahead of other work.

    Attributes:
        base: On the first rank.
        slope: How many more on each next one, whose gaps at the end of a step are longer.
        before_inputs: Whether it goes ahead of X too, or only of F.
    """

    base: int
    slope: int
    before_inputs: bool


ENDLESS = Patience(1 << 60, 0, False)
"""Weight gradients only fill gaps."""


def bounded_orders(
    costs: Sequence[LayerCost],
    sizes: Sequence[StageBytes],
    *,
    ranks: int,
    microbatches: int,
    byte_budget: int | None = None,
    patience: Patience = ENDLESS,
    link: Link = Link(),
) -> list[list[Action]]:
    """What each rank does if it runs X first, then F, then W, and W before what would not fit in the budget.

    Stages are dealt out in turn. Micro-batches go in rounds of as many as ranks, stage by stage, so that a rank
    is seldom without work.

    Args:
        costs: Of stages.
        sizes: Of stages.
        ranks: Devices.
        microbatches: Per step.
        byte_budget: What a rank may keep alive; None for no bound.
        patience: With weight gradients that wait.
        link: Between ranks.

    Raises:
        ScheduleError: If no order was found within the budget.
    """
    budget = 1 << 60 if byte_budget is None else byte_budget
    return _Simulation(costs, sizes, ranks, microbatches, budget, patience, link).run()


class _Simulation:
    def __init__(
        self,
        costs: Sequence[LayerCost],
        sizes: Sequence[StageBytes],
        ranks: int,
        microbatches: int,
        byte_budget: int,
        patience: Patience,
        link: Link,
    ) -> None:
        self.costs, self.sizes, self.ranks, self.budget, self.link = costs, sizes, ranks, byte_budget, link
        self.patience = patience
        self.stages, self.microbatches = len(costs), microbatches
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]
        self.held = [0] * ranks
        self.busy = [False] * ranks
        self.ready: list[dict[str, list[tuple[tuple[int, ...], int, int]]]] = [
            {"F": [], "X": [], "W": []} for _ in range(ranks)
        ]
        self.events: list[tuple[float, int, str, int, int, bool]] = []
        self.count = 0

    def run(self) -> list[list[Action]]:
        for microbatch in range(self.microbatches):
            self._arrive("F", 0, microbatch)
        now = 0.0
        while True:
            for rank in range(self.ranks):
                if not self.busy[rank]:
                    self._start(rank, now)
            if not self.events:
                break
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, _, what, stage, microbatch, ends = heapq.heappop(self.events)
                if ends:
                    self._end(what, stage, microbatch, now)
                else:
                    self._arrive(what, stage, microbatch)
        if sum(map(len, self.orders)) < 3 * self.stages * self.microbatches:
            raise ScheduleError(f"byte_budget={self.budget}: no order was found that keeps to it; raise it")
        return self.orders

    def _arrive(self, what: str, stage: int, microbatch: int) -> None:
        lap, chunk = microbatch // self.ranks, stage // self.ranks
        urgency = (lap, chunk if what == "F" else -chunk, microbatch)
        heapq.heappush(self.ready[stage % self.ranks][what], (urgency, stage, microbatch))

    def _start(self, rank: int, now: float) -> None:
        ready = self.ready[rank]
        for what in self._preferences(rank):
            if ready[what] and self._fits(rank, what):
                break
        else:
            return
        _, stage, microbatch = heapq.heappop(ready[what])
        self.held[rank] += {"F": self.sizes[stage].activations, "X": self.sizes[stage].gradients, "W": 0}[what]
        self.busy[rank] = True
        self.orders[rank].append((what, stage, microbatch))
        cost = self.costs[stage]
        seconds = {"F": cost.forward, "X": cost.input_grad, "W": cost.weight_grad}[what]
        self._post(now + seconds, what, stage, microbatch, True)

    def _preferences(self, rank: int) -> str:
        """Kinds of task, most urgent first."""
        if len(self.ready[rank]["W"]) <= self.patience.base + self.patience.slope * rank:
            return "XFW"
        return "WXF" if self.patience.before_inputs else "XWF"

    def _fits(self, rank: int, what: str) -> bool:
        """Whether the first task of a kind that is ready would keep to the budget; W always does.

        An X does so too where there is no W to make room for it: it must run some time.
        """
        if what == "W":
            return True
        stage = self.ready[rank][what][0][1]
        size = self.sizes[stage].activations if what == "F" else self.sizes[stage].gradients
        if self.held[rank] + size <= self.budget:
            return True
        return what == "X" and not self.ready[rank]["W"]

    def _end(self, what: str, stage: int, microbatch: int, now: float) -> None:
        self.busy[stage % self.ranks] = False
        if what == "W":
            self.held[stage % self.ranks] -= self.sizes[stage].activations + self.sizes[stage].gradients
            return
        if what == "X":
            self._arrive("W", stage, microbatch)
            self._send("X", stage - 1, microbatch, now, self.costs[stage].input_bytes)
        elif stage + 1 < self.stages:
            self._send("F", stage + 1, microbatch, now, self.costs[stage].output_bytes)
        else:
            self._arrive("X", stage, microbatch)

    def _send(self, what: str, stage: int, microbatch: int, now: float, size: int) -> None:
        if stage >= 0:
            away = self.ranks > 1
            self._post(now + (self.link.transfer_seconds(size) if away else 0.0), what, stage, microbatch, False)

    def _post(self, when: float, what: str, stage: int, microbatch: int, ends: bool) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, what, stage, microbatch, ends))
