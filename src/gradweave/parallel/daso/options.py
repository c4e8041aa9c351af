"""What a user may choose about DASO, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from gradweave.errors import ArgumentError

MODES = ("delta", "paper")
PAYLOADS = ("bfloat16", "float16", "float32")
PACES = ("time", "lr", "plateau")
ON_FAILURE = ("raise", "continue")
PAPER_EPOCHS = 4
PAPER_MOST_EVERY = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of :class:`~gradweave.DASO`, which describes them."""

    mode: str = "delta"
    every: int | None = None
    wait: int | None = None
    pace: str = "time"
    warm_up: int | None = None
    cool_down: int | None = None
    total: int | None = None
    payload: str = "bfloat16"
    on_failure: str = "raise"
    timeout: float = 300.0
    checkpoint_dir: Path = Path("daso-checkpoint")
    rhythm: tuple[tuple[int, int, int], ...] | None = None

    def __post_init__(self) -> None:
        for argument, value, allowed in (
            ("mode", self.mode, MODES),
            ("payload", self.payload, PAYLOADS),
            ("pace", self.pace, PACES),
            ("on_failure", self.on_failure, ON_FAILURE),
        ):
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
            raise ArgumentError(
                "total", None, "give the length of the training, for the cool-down to begin before its end"
            )
        for number, every, wait in self.rhythm or ():
            if number < 0 or every < 1 or not 0 <= wait <= every:
                raise ArgumentError("rhythm", (number, every, wait), "give a record that daso.rhythm was")
        if self.mode == "paper":
            self._check_paper()
        elif self.rhythm is not None and self.every is not None:
            raise ArgumentError("rhythm", "a record", "says when to exchange; leave out every and wait")

    def _check_paper(self) -> None:
        for argument, usual in (("wait", None), ("pace", "time"), ("rhythm", None)):
            value = getattr(self, argument)
            if value != usual:
                raise ArgumentError(argument, value, 'is set by the published rules with mode="paper"; leave it out')

    @property
    def group_timeout(self) -> timedelta:
        """For exchanges between nodes."""
        return timedelta(seconds=self.timeout)

    @property
    def node_timeout(self) -> timedelta:
        """For exchanges inside a node: ranks there wait for one that waits for other nodes, and for their verdict."""
        return timedelta(seconds=5 * self.timeout)
