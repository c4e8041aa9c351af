"""Timing of stock order and of candidates, in turns, over the steps that a loop takes anyway."""

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
    """Length of a trial, and the margin by which a candidate must win.

    Attributes:
        warm_up: Steps at the beginning of a turn that do not count, since memory and caches are those of another way.
        timed: Steps of each turn that count.
        rounds: Number of turns that each way takes. One round says little on a busy machine.
        most: Largest share of stock order's median time that a candidate may take. It must also be faster than stock
            order in every round.
    """

    warm_up: int = 2
    timed: int = 4
    rounds: int = 3
    most: float = 0.97

    @property
    def steps(self) -> int:
        """Number of steps of a turn."""
        return self.warm_up + self.timed

    def pays(self, candidate: Sequence[float], stock: Sequence[float]) -> bool:
        """Return whether a candidate is worth leaving stock order for, by the seconds that each took in each round."""
        always = all(mine < other for mine, other in zip(candidate, stock, strict=True))
        return always and median(candidate) <= self.most * median(stock)


RULES = TrialRules()


class Clock(Protocol):
    """Clock of the device that computes."""

    def now(self) -> Any:
        """Return this moment."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two moments."""


class HostClock:
    """The host's clock, read when the device has finished all of its work."""

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
    """The clock of a GPU, by events on its current stream; on a CPU, the host's clock.

    The host does not wait for a moment, only for the time between two, which is read when the trial is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        """Return the moment at which the device comes to the next kernel of its current stream."""
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
    """Trial in which several ways to take steps, the first of them stock order, take turns.

    Each way has one turn per round. A technique that sees only the ends of steps calls :meth:`step_ended`; a technique
    that times a part of each step puts that part between :meth:`begin_step` and :meth:`end_step`.

    Args:
        ways: Stock order, then the candidates.
        clock: The clock to read.
        rules: Length of turns, and margin.
        each_step: Read the clock at every counted step, not only at the ends of a turn. A clock that waits for the
            device keeps the host from running ahead, which a step of the loop does: read it at the ends only.
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
        """Whether all turns are over."""
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
        """Begin to time a step; a second call before its end changes nothing."""
        if not self.is_over and self._steps >= self.rules.warm_up and self._began is None:
            self._began = self._clock.now()

    def cancel_step(self) -> None:
        """Forget the beginning of a step that will not end, such as a forward without a backward."""
        if self._each_step:
            self._began = None

    def end_step(self) -> None:
        """End a step; a turn ends with its last step."""
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
        """End a step, and begin the next at once."""
        self.end_step()
        self.begin_step()

    def seconds(self) -> list[list[float]]:
        """Return the seconds of a step, by way and round; turns that are not over are left out.

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
            agree: Makes the seconds the same on all ranks that decide together; None for one rank.
        """
        seconds = self.seconds() if agree is None else agree(self.seconds())
        stock, *candidates = seconds
        paying = [
            (median(own), number) for number, own in enumerate(candidates, start=1) if self.rules.pays(own, stock)
        ]
        return [self.ways[number] for _, number in sorted(paying)]
