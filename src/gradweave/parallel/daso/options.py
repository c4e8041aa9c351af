"""The options of DASO, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

from gradweave.errors import ArgumentError

Mode = Literal["delta", "paper"]
Payload = Literal["bfloat16", "float16", "float32"]
Pace = Literal["time", "lr", "plateau"]
OnFailure = Literal["raise", "continue"]

PAPER_EPOCHS = 4
"""Epochs of warm-up, and of cool-down, by the published rules."""
PAPER_MOST_EVERY = 8
"""Most steps between exchanges by the published rules."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of :class:`~gradweave.DASO`, which documents them."""

    mode: Mode
    every: int | None
    wait: int | None
    pace: Pace
    warm_up: int | None
    cool_down: int | None
    total: int | None
    payload: Payload
    on_failure: OnFailure
    timeout: float
    checkpoint_dir: Path
    rhythm: tuple[tuple[int, int, int], ...] | None

    def __post_init__(self) -> None:
        for argument, literal in (("mode", Mode), ("payload", Payload), ("pace", Pace), ("on_failure", OnFailure)):
            value, allowed = getattr(self, argument), get_args(literal)
            if value not in allowed:
                raise ArgumentError(argument, value, f"use one of {', '.join(allowed)}")
        for argument, least in (("every", 1), ("wait", 0), ("warm_up", 0), ("cool_down", 0), ("total", 1)):
            value = getattr(self, argument)
            if value is not None and value < least:
                raise ArgumentError(argument, value, f"give at least {least}")
        if self.timeout <= 0:
            raise ArgumentError("timeout", self.timeout, "give a positive number of seconds")
        if self.every is not None and self.wait is not None and self.wait > self.every:
            raise ArgumentError(
                "wait", self.wait, f"give at most every={self.every}: one exchange is under way at a time"
            )
        if self.cool_down and self.total is None:
            raise ArgumentError("total", None, "give the length of the training: the cool-down begins before its end")
        for number, every, wait in self.rhythm or ():
            if number < 0 or every < 1 or not 0 <= wait <= every:
                raise ArgumentError("rhythm", (number, every, wait), "give a record of daso.rhythm")
        if self.mode == "paper":
            self._check_paper()
        elif self.rhythm is not None and (self.every, self.wait) != (None, None):
            raise ArgumentError("rhythm", self.rhythm, "says when to exchange; leave out every and wait")

    def _check_paper(self) -> None:
        for argument, usual in (("wait", None), ("pace", "time"), ("rhythm", None)):
            value = getattr(self, argument)
            if value != usual:
                raise ArgumentError(argument, value, 'is set by the published rules with mode="paper"; leave it out')

    @property
    def group_timeout(self) -> timedelta:
        """Timeout of messages between nodes."""
        return timedelta(seconds=self.timeout)

    @property
    def node_timeout(self) -> timedelta:
        """Timeout of messages inside a node: its ranks wait for one that waits for other nodes and their verdict."""
        return timedelta(seconds=5 * self.timeout)
