"""Stock order against candidates, by turns over the steps that a loop takes anyway; then the best one stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

import torch

Way = TypeVar("Way")


@dataclass(frozen=True)
class TrialRules:
    """How long a trial lasts, and what it takes to leave stock order.

    Attributes:
        warm_up: Steps at the beginning of each turn that do not count: memory and caches are those of another way.
        timed: Steps of each turn that count.
        rounds: Turns that each way takes. One round says little on a busy machine.
        most: Largest share of stock order's median time that a candidate may take. It must also be faster than stock
            order in every round.
    """

    warm_up: int = 2
    timed: int = 4
    rounds: int = 3
    most: float = 0.97

    @property
    def steps(self) -> int:
        """Steps of a turn."""
        return self.warm_up + self.timed

    def pays(self, candidate: Sequence[float], stock: Sequence[float]) -> bool:
        """Return whether a candidate's seconds, by round, are worth leaving stock order for."""
        always = all(mine < other for mine, other in zip(candidate, stock, strict=True))
        return always and median(candidate) <= self.most * median(stock)


RULES = TrialRules()


class Clock(Protocol):
    """Moments of the device that computes."""

    def now(self) -> Any:
        """Return this moment."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two moments."""


class HostClock:
    """The host's clock, read after all that the device was given is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """Return this moment, after waiting for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Return the time between two moments."""
        return end - begin


class DeviceClock:
    """Events on the device's current stream, so that the host need not wait; on a CPU, the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        """Return the moment at which the device comes to what it is given next."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two moments; on a GPU, wait for the later one."""
        if not self._cuda:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class ABTrial(Generic[Way]):
    """Ways to take steps, the first of them stock order, take turns; each has as many turns as there are rounds.

    A loop of which only the ends of steps are seen calls :meth:`step_ended`. Where a part of a step counts, that part
    is between :meth:`begin_step` and :meth:`end_step`.

    Args:
        ways: Stock order, then the candidates.
        clock: Reads the time.
        rules: How long turns are and what pays.
        each_step: Read the clock at every counted step, rather than at the ends of a turn only: reading a clock that
            waits for the device keeps the host from running ahead, which is a part of what is measured.
    """

    def __init__(
        self, ways: Sequence[Way], clock: Clock, *, rules: TrialRules = RULES, each_step: bool = False
    ) -> None:
        self.ways = tuple(ways)
        self.rules = rules
        self._clock = clock
        self._each_step = each_step
        self._turns = list(self.ways) * rules.rounds
        self._spans: list[list[tuple[Any, Any]]] = [[] for _ in self._turns]
        self._turn = 0
        self._steps = 0
        self._began: Any = None

    @property
    def is_over(self) -> bool:
        """Whether all turns were taken."""
        return self._turn == len(self._turns)

    @property
    def turns_left(self) -> int:
        """Number of turns that are not over."""
        return len(self._turns) - self._turn

    @property
    def current(self) -> Way:
        """The way to take the next step; after the trial, that of its last turn."""
        return self._turns[min(self._turn, len(self._turns) - 1)]

    def begin_step(self) -> None:
        """Note that what counts of a step begins; doing so again before its end changes nothing."""
        if not self.is_over and self._steps >= self.rules.warm_up and self._began is None:
            self._began = self._clock.now()

    def cancel_step(self) -> None:
        """Forget the beginning of a step that has no end, such as a forward without a backward."""
        if self._each_step:
            self._began = None

    def end_step(self) -> None:
        """Note that a step is over; a turn ends with its last step."""
        if self.is_over:
            return
        self._steps += 1
        is_last = self._steps == self.rules.steps
        if self._began is not None and (self._each_step or is_last):
            self._spans[self._turn].append((self._began, self._clock.now()))
            self._began = None
        if is_last:
            self._turn, self._steps = self._turn + 1, 0

    def step_ended(self) -> None:
        """Note that a step is over, and that the next begins at once."""
        self.end_step()
        self.begin_step()

    def seconds(self) -> list[list[float]]:
        """Return seconds of a step, by way and round; rounds that are not over are left out.

        A turn's steps count by their median if each was timed, and by their mean otherwise.
        """
        found: list[list[float]] = [[] for _ in self.ways]
        for turn, spans in enumerate(self._spans[: self._turn]):
            took = [self._clock.seconds(begin, end) for begin, end in spans]
            if took:
                step = median(took) if self._each_step else sum(took) / self.rules.timed
                found[turn % len(self.ways)].append(step)
        return found

    def paying(self, agree: Callable[[list[list[float]]], list[list[float]]] | None = None) -> list[Way]:
        """Return the candidates that pay, fastest first.

        Args:
            agree: Make the seconds the same on all ranks that decide together.
        """
        seconds = self.seconds() if agree is None else agree(self.seconds())
        stock, *candidates = seconds
        paying = [
            (median(own), number) for number, own in enumerate(candidates, start=1) if self.rules.pays(own, stock)
        ]
        return [self.ways[number] for _, number in sorted(paying)]
