"""Timelines in files: pictures and traces, by the ending of the file's name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gradweave.errors import ArgumentError
from gradweave.schedule.picture import SUFFIXES, save_overlay, save_picture
from gradweave.schedule.timeline import Timeline
from gradweave.schedule.trace import save_trace


def check_ending(path: Path) -> None:
    """Raise ArgumentError for a file name of neither a picture nor a trace; to be called before the work for it."""
    if path.suffix not in (*SUFFIXES, ".json"):
        raise ArgumentError("path", str(path), f"end it in {', '.join(SUFFIXES)} (picture) or .json (trace)")


def save_timelines(timelines: Iterable[Timeline], path: str | Path) -> None:
    """Write several timelines into one picture, on one time axis, or into one trace."""
    path = Path(path)
    check_ending(path)
    if path.suffix == ".json":
        save_trace(list(timelines), path)
    else:
        save_picture(list(timelines), path)


def save_beside_plan(measured: Timeline, planned: Timeline, path: str | Path) -> None:
    """Write a measured timeline and its prediction into one picture, stream by stream, or into one trace."""
    path = Path(path)
    check_ending(path)
    if path.suffix == ".json":
        save_trace([planned, measured], path)
    else:
        save_overlay([(planned, measured)], path)
