"""Recording when the parts of a step run, on the host's clock or on a GPU's streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradweave.schedule.tasks import Kind, Task
from gradweave.schedule.timeline import Span, Timeline

Mark = float | torch.cuda.Event
_MAIN, _SIDE = "main", "side"
_INNER = (Kind.W, Kind.U)


class Recorder:
    """Notes the begin and end of forward, backward, weight gradients and updates; what is inside another cuts it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[Kind, str, int, int, Mark, Mark]] = []
        self._main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._origin = self._mark()
        self._updates = 0
        self.step = 0

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _lane(self) -> str:
        if self._main is None or torch.cuda.current_stream(self._device) == self._main:
            return _MAIN
        return _SIDE

    @contextmanager
    def part(self, kind: Kind, layer: int = 0) -> Iterator[None]:
        """Records what runs inside."""
        lane, begin = self._lane(), self._mark()
        yield
        self._parts.append((kind, lane, self.step, layer, begin, self._mark()))

    @contextmanager
    def update(self, bucket: int) -> Iterator[None]:
        """Records the update of a bucket."""
        with self.part(Kind.U, bucket):
            yield

    @contextmanager
    def weight_gradient(self, layer: int) -> Iterator[None]:
        """Records the weight gradient of a layer."""
        with self.part(Kind.W, layer):
            yield

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float) and isinstance(self._origin, float):
            return mark - self._origin
        elapsed: float = self._origin.elapsed_time(mark)  # type: ignore[union-attr, arg-type]
        return elapsed / 1e3

    def timeline(self, title: str) -> Timeline:
        """What was recorded, from the first part on, with the same track names as the simulator's."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        prefix = "gpu0" if self._device.type == "cuda" else "cpu"
        spans: list[Span] = []
        first = min((self._seconds(begin) for *_, begin, _ in self._parts), default=0.0)
        timed = [
            (kind, lane, step, layer, self._seconds(begin) - first, self._seconds(end) - first)
            for kind, lane, step, layer, begin, end in self._parts
        ]
        cutting = sorted((a, b, lane) for kind, lane, _, _, a, b in timed if kind in _INNER)
        for kind, lane, step, layer, start, end in timed:
            inner = [] if kind in _INNER else [(a, b) for a, b, on in cutting if on == lane and a >= start and b <= end]
            for begin, stop in _cut(start, end, inner):
                name = f"{prefix} {lane}"
                spans.append(Span(name, begin, stop, Task(kind, layer, stop - begin, prefix, step=step), len(spans)))
        spans.sort(key=lambda span: span.start)
        lanes = [lane for lane in (_MAIN, _SIDE) if any(span.lane.endswith(lane) for span in spans)]
        return Timeline(tuple(spans), tuple((f"{prefix} {lane}", prefix) for lane in lanes), title=title)


def _cut(start: float, end: float, inner: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """What is left of an interval without the ones inside it."""
    for begin, stop in inner:
        if begin > start:
            yield start, begin
        start = max(start, stop)
    if end > start:
        yield start, end
