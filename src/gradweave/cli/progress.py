"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Progressed = Callable[[str, float], None]
"""Called with the current activity and the share that is done."""
_REFRESH_SECONDS = 0.1
_FIRST_LINE_SECONDS = 3.0
_LONGEST_WAIT_SECONDS = 60.0
_SHARE_OF_WAIT = 0.1
"""Time until the next plain line, as a share of the time gone by."""
_LEAST_SHARE = 0.03
"""Share of the work that must be done before the time left is estimated: the first steps warm up."""


@contextmanager
def progress(names: Sequence[str], doing: str, *, quiet: bool) -> Iterator[Iterator[str]]:
    """Iterate over ``names`` and show on stderr which one is under way."""
    on_terminal = sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    lines = _Heartbeat(doing, len(names))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet or not on_terminal) as bar:
        task = bar.add_task(doing, total=len(names))

        def each() -> Iterator[str]:
            for number, name in enumerate(names, 1):
                bar.update(task, description=f"{doing} {name}")
                lines.now(number, name)
                yield name
                bar.advance(task)

        if not quiet and not on_terminal:
            lines.start()
        try:
            yield each()
        finally:
            lines.stop()


@contextmanager
def share_done(*, quiet: bool) -> Iterator[Progressed]:
    """Yield a function that shows the current activity and the share that is done.

    It runs no thread, which could disturb the times that are measured meanwhile.
    """
    if quiet:
        yield lambda *_: None
    elif sys.stderr.isatty():
        with _bar() as show:
            yield show
    else:
        yield PlainLines()


@contextmanager
def _bar() -> Iterator[Progressed]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("preparing", total=1.0)
        shown, text = 0.0, ""

        def show(doing: str, done: float) -> None:
            nonlocal shown, text
            bar.update(task, description=doing, completed=done)
            now = time.monotonic()
            if doing != text or now - shown > _REFRESH_SECONDS:
                shown, text = now, doing
                bar.refresh()

        yield show


class PlainLines:
    """Prints a line when another activity begins, and now and then while it lasts, with an estimate of the time left.

    Args:
        now: The clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._next = self._began + _FIRST_LINE_SECONDS
        self._activity = ""

    def __call__(self, doing: str, done: float) -> None:
        """Print the current activity, if a line is due."""
        # "round 7 of 20" is the same activity as "round 6 of 20".
        now, activity = self._now(), re.sub(r"\d+", "", doing)
        if activity == self._activity and now < self._next:
            return
        gone = now - self._began
        self._activity = activity
        self._next = now + min(_LONGEST_WAIT_SECONDS, max(_FIRST_LINE_SECONDS, _SHARE_OF_WAIT * gone))
        left = f", about {_duration(gone / done * (1 - done))} left" if done >= _LEAST_SHARE and gone >= 1 else ""
        print(f"{doing}, {done:.0%} done{left}", file=sys.stderr, flush=True)


class _Heartbeat:
    """Prints a line now and then about the item under way, from a thread of its own."""

    def __init__(self, doing: str, count: int) -> None:
        self._doing, self._count = doing, count
        self._what = doing
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def now(self, number: int, name: str) -> None:
        self._what = f"{self._doing} {name}, {number} of {self._count}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _beat(self) -> None:
        began, wait = time.monotonic(), _FIRST_LINE_SECONDS
        while not self._stopped.wait(wait):
            gone = time.monotonic() - began
            print(f"{self._what}, after {_duration(gone)}", file=sys.stderr, flush=True)
            wait = min(_LONGEST_WAIT_SECONDS, max(_FIRST_LINE_SECONDS, _SHARE_OF_WAIT * gone))


def _duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
