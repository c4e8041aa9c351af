"""Recording of when the parts of a step run, by the host's clock or on a GPU's streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from gradweave.schedule.tasks import Kind, Task
from gradweave.schedule.timeline import Span, Timeline

Mark = float | torch.cuda.Event
_MAIN, _SIDE = "main", "side"
_INNER = (Kind.W, Kind.U)
"""Kinds that are cut out of a forward or backward during which they run."""


class _Part(NamedTuple):
    """One recorded part."""

    kind: Kind
    layer: int
    note: str
    step: int
    lane: str
    begin: Mark
    end: Mark


class Recorder:
    """Records the begin and end of forward, backward, weight gradients and updates; a part inside another cuts it.

    On a GPU begin and end are events on the current stream, so that recording does not synchronize and a part on a
    second stream gets that stream's times.

    Args:
        device: The device that trains.

    Attributes:
        step: Number of the step that parts belong to; to be counted up from outside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[_Part] = []
        self._main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._origin = self._mark()
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
    def part(self, kind: Kind, layer: int = 0, note: str = "") -> Iterator[None]:
        """Record the body of the context as a part of the current step."""
        lane, begin = self._lane(), self._mark()
        yield
        self._parts.append(_Part(kind, layer, note, self.step, lane, begin, self._mark()))

    @contextmanager
    def update(self, bucket: int) -> Iterator[None]:
        """Record the update of a bucket; its number takes the place of a layer's."""
        with self.part(Kind.U, bucket, "bucket"):
            yield

    @contextmanager
    def weight_gradient(self, layer: int) -> Iterator[None]:
        """Record the weight gradient of a layer."""
        with self.part(Kind.W, layer):
            yield

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float) and isinstance(self._origin, float):
            return mark - self._origin
        elapsed: float = self._origin.elapsed_time(mark)  # type: ignore[union-attr, arg-type]
        return elapsed / 1e3

    def timeline(self, title: str) -> Timeline:
        """Return what was recorded, from the first part on, with the lane names of the simulator."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        prefix = "gpu0" if self._device.type == "cuda" else "cpu"
        spans: list[Span] = []
        first = min((self._seconds(part.begin) for part in self._parts), default=0.0)
        timed = [(part, self._seconds(part.begin) - first, self._seconds(part.end) - first) for part in self._parts]
        cutting = sorted((start, end, part.lane) for part, start, end in timed if part.kind in _INNER)
        for part, start, end in timed:
            inner = [
                (a, b)
                for a, b, lane in cutting
                if part.kind not in _INNER and lane == part.lane and a >= start and b <= end
            ]
            for begin, stop in _cut(start, end, inner):
                task = Task(part.kind, part.layer, stop - begin, prefix, step=part.step, note=part.note)
                spans.append(Span(f"{prefix} {part.lane}", begin, stop, task, len(spans)))
        spans.sort(key=lambda span: span.start)
        lanes = [lane for lane in (_MAIN, _SIDE) if any(span.lane.endswith(lane) for span in spans)]
        # Measured steps differ: the time per step is the mean over all of them, not that of the last.
        period = max(1, len({part.step for part in self._parts}) - 1)
        named = tuple((f"{prefix} {lane}", prefix) for lane in lanes)
        return Timeline(tuple(spans), named, title=title, period=period)


def _cut(start: float, end: float, inner: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Return the pieces of an interval that are left without the ones inside it."""
    for begin, stop in inner:
        if begin > start:
            yield start, begin
        start = max(start, stop)
    if end > start:
        yield start, end
