"""Timelines as Chrome traces, which Perfetto opens: a process per timeline, a track per lane."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradweave.errors import ArgumentError
from gradweave.schedule.timeline import Timeline

_MICROSECONDS = 1e6
"""Per second; the format counts in microseconds."""


def save_trace(timelines: Sequence[Timeline], path: Path) -> None:
    """Write one trace with all timelines."""
    events = [event for process, timeline in enumerate(timelines) for event in _events(process, timeline)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise ArgumentError("path", str(path), f"cannot be written: {error.strerror}") from None


def _events(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the trace events of a timeline: M names a track, X is a task, C a value of a counter."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.title}}
    thread_of = {}
    for thread, (lane, _) in enumerate(timeline.lanes):
        thread_of[lane] = thread
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}
    for span in timeline.spans:
        task = span.task
        yield {
            "ph": "X",
            "name": f"{task.kind}{task.layer}",
            "cat": str(task.kind),
            "pid": process,
            "tid": thread_of[span.lane],
            "ts": span.start * _MICROSECONDS,
            "dur": (span.end - span.start) * _MICROSECONDS,
            "args": {"task": task.label, "layer": task.layer, "micro-batch": task.microbatch, "step": task.step},
        }
    for device, points in timeline.memory.items():
        for when, size in points:
            yield {
                "ph": "C",
                "name": f"bytes held on {device}",
                "pid": process,
                "ts": when * _MICROSECONDS,
                "args": {"bytes": size},
            }
