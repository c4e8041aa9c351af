"""What DASO did, as numbers for any logger and as a timeline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

from gradweave.parallel.daso.cadence import Rhythm
from gradweave.parallel.daso.transfer import Transfer
from gradweave.schedule import Costs, LayerCost, Link, Span, Task, Timeline, hierarchical, plan
from gradweave.schedule.builders import DEVICE
from gradweave.schedule.policies.daso import GLOBAL_LINK
from gradweave.schedule.policies.one_device import MAIN
from gradweave.schedule.tasks import Kind

_KEPT = 512
"""Steps and exchanges of which times are kept."""
_SHOWN = 12
"""Steps in a picture, at least."""
_MEASURED = 16
"""Steps whose median is the time of one."""


class Record:
    """Times of steps and exchanges, and sums over the whole run."""

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.exchanges = 0
        self.failed = 0
        self.exposed = 0.0
        self.staleness = 0
        self.transfer_seconds = 0.0
        self.vote_seconds = 0.0
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)
        self._transfers: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._mark: float | None = None
        self._waited = 0.0
        self.work = float("nan")
        """Seconds of the last exchange that were work: packing, sending and merging."""
        self._work = 0.0
        self._durations: deque[float] = deque(maxlen=_MEASURED)

    def stepped(self) -> None:
        """Told at the end of each step."""
        now = time.perf_counter()
        if self._mark is not None:
            self._steps.append((self._mark, now, self._waited))
            self._durations.append(now - self._mark - self._waited)
        self._mark, self._waited = now, 0.0

    def paused(self) -> None:
        """Told where the time until the next step says nothing, such as behind a checkpoint."""
        self._mark = None

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, without waiting for other nodes."""
        return median(self._durations) if self._durations else float("nan")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what is done for exchanges at the end of a step."""
        began, waited = time.perf_counter(), self._waited
        try:
            yield
        finally:
            spent = time.perf_counter() - began - (self._waited - waited)
            self._waited += spent
            self._work += spent

    def waited(self, seconds: float) -> None:
        """Told how long training stood still for other nodes."""
        self._waited += seconds
        self.exposed += seconds

    def sent(self, size: int, nodes: int) -> None:
        """Told of an exchange: each node sends and receives this share of its size in a ring."""
        self.bytes_sent += 2 * (nodes - 1) * size // nodes
        self.exchanges += 1

    def merged(self) -> None:
        """Told when an exchange has been merged: what was worked for it is known."""
        self.work, self._work = self._work, 0.0

    def arrived(self, transfer: Transfer, staleness: int) -> None:
        """Told when a transfer was under way, and how many steps its merge came behind it."""
        self._transfers.append((transfer.began, transfer.ended))
        self.transfer_seconds = transfer.ended - transfer.began
        self.vote_seconds = transfer.judged - transfer.ended
        self.staleness = staleness

    def stats(self, rhythm: Rhythm) -> dict[str, float]:
        """Plain numbers."""
        return {
            "bytes_sent": self.bytes_sent,
            "exchanges": self.exchanges,
            "failed_exchanges": self.failed,
            "exposed_seconds": self.exposed,
            "staleness": self.staleness,
            "transfer_seconds": self.transfer_seconds,
            "step_seconds": self.step_seconds,
            "every": rhythm.every,
            "wait": rhythm.wait,
        }

    def timelines(self, rhythm: Rhythm, nodes: int, places: int) -> tuple[Timeline, Timeline]:
        """What is planned with the measured times of a step and a transfer, and what was measured of late."""
        count = max(_SHOWN, rhythm.wait + 2 * rhythm.every)
        planned = predict(
            self.step_seconds, self.transfer_seconds, nodes=nodes, local_ranks=places,
            every=rhythm.every, wait=rhythm.wait, steps=count,
        )  # fmt: skip
        return planned, self._measured(count)

    def _measured(self, count: int) -> Timeline:
        steps = list(self._steps)[-count:]
        begin, end = (steps[0][0], steps[-1][1]) if steps else (0.0, 0.0)
        spans = []
        for number, (start, stop, waited) in enumerate(steps):
            task = Task(Kind.F, 0, stop - start - waited, DEVICE, step=number)
            spans.append(Span(MAIN, start - begin + waited, stop - begin, task, number))
        for start, stop in self._transfers:
            if stop > begin and start < end:
                task = Task(Kind.C, 0, stop - start, GLOBAL_LINK, note="exchange")
                spans.append(Span(GLOBAL_LINK, max(0.0, start - begin), stop - begin, task, len(spans)))
        lanes = ((MAIN, DEVICE), (GLOBAL_LINK, GLOBAL_LINK))
        return Timeline(tuple(sorted(spans, key=lambda span: span.start)), lanes, title="measured")


def predict(
    step_seconds: float, transfer_seconds: float, *, nodes: int, local_ranks: int, every: int, wait: int, steps: int
) -> Timeline:
    """The simulator's timeline of DASO from a measured step and a measured transfer."""
    layer = LayerCost("step", step_seconds, 0.0, 0.0, 0.0, 0, 0, 2**30)
    # A link on which 2**30 bytes take as long as the transfer took.
    bandwidth = 2 * (nodes - 1) / nodes * 2**30 / transfer_seconds if transfer_seconds else float("inf")
    graph = hierarchical(
        Costs((layer,), name="measured"), nodes=nodes, local_ranks=local_ranks, link=Link(bandwidth), steps=steps
    )
    timeline = plan(graph, policy="daso", every=every, wait=wait).simulate()
    return replace(timeline, title="planned")
