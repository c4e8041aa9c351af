"""Statistics of a run, as numbers for any logger and as timelines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

from gradweave.parallel.daso.rhythm import Rhythm
from gradweave.parallel.daso.transfer import Transfer
from gradweave.schedule import Costs, LayerCost, Link, Span, Task, Timeline, hierarchical, plan
from gradweave.schedule.builders import DEVICE
from gradweave.schedule.policies.daso import GLOBAL_LINK
from gradweave.schedule.policies.one_device import MAIN
from gradweave.schedule.tasks import Kind

_KEPT = 512
"""Steps and exchanges whose times are kept."""
_SHOWN = 12
"""Fewest steps in a timeline."""
_MEASURED = 16
"""Steps whose median is the duration of a step."""


class Stats:
    """Times of steps and exchanges, and sums over the whole run.

    Attributes:
        bytes_sent: Bytes that this rank sent to other nodes.
        exchanges: Exchanges that it carried.
        failed: Exchanges that did not count.
        exposed: Seconds that training stood still for other nodes.
        staleness: Steps from the last send to its merge.
        transfer_seconds: Duration of the last transfer.
        vote_seconds: Duration of the vote on it.
        work: Seconds of the last exchange that were work: packing, sending and merging.
    """

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
        self._work = 0.0
        self._durations: deque[float] = deque(maxlen=_MEASURED)

    def stepped(self) -> None:
        """Note the end of a step."""
        now = time.perf_counter()
        if self._mark is not None:
            self._steps.append((self._mark, now, self._waited))
            self._durations.append(now - self._mark - self._waited)
        self._mark, self._waited = now, 0.0

    def paused(self) -> None:
        """Ignore the time until the next step, as after a checkpoint."""
        self._mark = None

    @property
    def step_seconds(self) -> float:
        """Duration of a step in seconds, without waiting for other nodes."""
        return median(self._durations) if self._durations else float("nan")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Return the context of what is done for exchanges at the end of a step."""
        began, waited = time.perf_counter(), self._waited
        try:
            yield
        finally:
            spent = time.perf_counter() - began - (self._waited - waited)
            self._waited += spent
            self._work += spent

    def waited(self, seconds: float) -> None:
        """Add seconds in which training stood still for other nodes."""
        self._waited += seconds
        self.exposed += seconds

    def sent(self, size: int, nodes: int) -> None:
        """Add an exchange of ``size`` bytes between nodes."""
        # In a ring, each node sends and receives this share.
        self.bytes_sent += 2 * (nodes - 1) * size // nodes
        self.exchanges += 1

    def merged(self) -> None:
        """Note that an exchange was merged, which ends the work on it."""
        self.work, self._work = self._work, 0.0

    def arrived(self, transfer: Transfer, staleness: int) -> None:
        """Note the times of a transfer, and the steps from its send to its merge."""
        self._transfers.append((transfer.began, transfer.ended))
        self.transfer_seconds = transfer.ended - transfer.began
        self.vote_seconds = transfer.judged - transfer.ended
        self.staleness = staleness

    def as_dict(self, rhythm: Rhythm) -> dict[str, float]:
        """Return plain numbers."""
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
        """Return the timeline predicted from the measured times of a step and a transfer, and the measured one."""
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
    """Return the simulator's timeline of DASO, from a measured step and a measured transfer."""
    layer = LayerCost("step", step_seconds, 0.0, 0.0, 0.0, 0, 0, 2**30)
    # A link on which 2**30 bytes take as long as the transfer took.
    bandwidth = 2 * (nodes - 1) / nodes * 2**30 / transfer_seconds if transfer_seconds else float("inf")
    graph = hierarchical(
        Costs((layer,), name="measured"), nodes=nodes, local_ranks=local_ranks, link=Link(bandwidth), steps=steps
    )
    timeline = plan(graph, policy="daso", every=every, wait=wait).simulate()
    return replace(timeline, title="planned")
