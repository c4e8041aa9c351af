"""Seconds of operations without their launches: captured in a CUDA graph, and replayed."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch

from gradweave._compat.dispatch import EveryCall
from gradweave.schedule.tasks import Kind

_SECONDS_OF_GROUP = 2e-3
"""Least time of what is compared on two streams: overlap is not seen in less than their launches take."""
_SECONDS_OF_TASK = 2e-4
_MOST_REPEATS = 40
_TURNS = 5
_WARM_UPS = 3

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class TaskCalls:
    """The operations of a step by task, kept with all that they read, so that they can be repeated.

    Attributes:
        by_task: The calls of every task.
    """

    def __init__(self) -> None:
        self.by_task: dict[tuple[Kind, int], list[Call]] = defaultdict(list)

    @contextmanager
    def keep(self, kind: Kind, layer: int) -> Iterator[None]:
        """Keep what is called inside, as calls of a task; updates are left out."""
        if kind is Kind.U:
            yield
            return
        kept = self.by_task[kind, layer]
        with EveryCall(lambda *call: kept.append(call)):
            yield

    def seconds(self, device: torch.device, progress: Callable[[float], None]) -> dict[tuple[Kind, int], float]:
        """Measure every task alone: its work, and no launches from the host."""
        with torch.no_grad(), torch.cuda.device(device):
            # The tasks run one after the other, so that they can share one stream and one memory pool.
            stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            found = {}
            for number, (kind, layer) in enumerate(list(self.by_task)):
                progress(number / len(self.by_task))
                run = partial(self.run, kind, [layer])
                found[kind, layer] = CapturedRepeats(run, stream, least_seconds=_SECONDS_OF_TASK, pool=pool)
        return {task: repeats.seconds_of_one for task, repeats in found.items()}

    def run(self, kind: Kind, layers: Sequence[int]) -> None:
        """Repeat the operations of some layers, in the order of forward or backward."""
        for layer in layers if kind is Kind.F else reversed(layers):
            for function, args, kwargs in self.by_task[kind, layer]:
                function(*args, **kwargs)


class CapturedRepeats:
    """Operations captured in one CUDA graph, as often as it takes for a measurable time.

    Two that are to be replayed at the same time must be captured on different streams, because matrix products of one
    stream share a cuBLAS workspace, and without a ``pool``, so that neither writes to memory that the other uses.

    Attributes:
        seconds: Of all repeats, alone.
        seconds_of_one: Of one of them.
    """

    def __init__(
        self,
        run: Callable[[], None],
        stream: torch.cuda.Stream,
        *,
        least_seconds: float = _SECONDS_OF_GROUP,
        pool: Any = None,
    ) -> None:
        self._graph = _capture(run, stream, 1, pool)
        repeats = max(1, min(_MOST_REPEATS, round(least_seconds / max(self._time(), 1e-6))))
        if repeats > 1:
            self._graph = _capture(run, stream, repeats, pool)
        self.seconds = self._time()
        self.seconds_of_one = self.seconds / repeats

    def replay(self) -> None:
        """Run all repeats on the current stream."""
        self._graph.replay()

    def _time(self) -> float:
        self.replay()
        return median_seconds(self.replay)


def median_seconds(run: Callable[[], None]) -> float:
    """Return the median time of some runs on the current stream, by events on the device."""
    spent: list[float] = []
    for _ in range(_TURNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()  # an idle device: begin is recorded when the run begins, not while others go on
        begin.record()
        run()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) / 1e3)
    return median(spent)


def seconds_side_by_side(one: CapturedRepeats, other: CapturedRepeats) -> float:
    """Return how long two take that begin at the same time, on two streams."""
    side = torch.cuda.Stream()

    def both() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            one.replay()
        other.replay()
        main.wait_stream(side)

    return median_seconds(both)


def _capture(run: Callable[[], None], stream: torch.cuda.Stream, repeats: int, pool: Any) -> torch.cuda.CUDAGraph:
    """Capture repeated operations; unlike ``torch.cuda.graph``, leave the allocator's cache as it is."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # operations that are views only
        graph.capture_begin(pool=pool)
        try:
            for _ in range(repeats):
                run()
        finally:
            graph.capture_end()
    return graph


def captured_seconds(run: Callable[[], None], device: torch.device) -> float | None:
    """Return the time of work in a CUDA graph; None if a graph cannot hold it."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):  # what allocates or compiles in its first run must not do so in a capture
                    run()
                with _synchronization_refused():
                    run()
            return CapturedRepeats(run, stream).seconds_of_one
        except RuntimeError:
            return None
        finally:
            torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def _synchronization_refused() -> Iterator[None]:
    """Return a context in which waiting for the device raises; a capture that fails of it damages the allocator."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
