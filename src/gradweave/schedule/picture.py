"""Gantt charts of timelines: a row per stream and link, a colour per kind of task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradweave.errors import ArgumentError
from gradweave.schedule.tasks import Kind
from gradweave.schedule.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = {Kind.F: "#4477aa", Kind.X: "#228833", Kind.W: "#ee7733", Kind.C: "#aa3377", Kind.U: "#ccbb44"}
"""Distinguishable with the common forms of colour blindness; odd steps are drawn lighter."""
NAMES = {
    Kind.F: "F forward",
    Kind.X: "X input gradient",
    Kind.W: "W weight gradient",
    Kind.C: "C communication",
    Kind.U: "U update",
}
_IDLE = "#e9e9e9"
_WIDTH_INCHES = 12.0
_DPI = 150
_PLOT_PIXELS = 0.88 * _WIDTH_INCHES * _DPI
_NARROW_PIXELS = 4.0
_DIGIT_PIXELS = 8.0


@dataclass(frozen=True)
class _Box:
    """Neighbouring spans drawn as one."""

    kind: Kind
    text: str
    step: int
    start: float
    end: float


def save_picture(timelines: Sequence[Timeline], path: Path) -> None:
    """Draws timelines above one another on one time axis."""
    if path.suffix not in SUFFIXES:
        raise ArgumentError("path", str(path), f"end it in {', '.join(SUFFIXES)} (picture) or .json (trace)")
    if not timelines or not any(timeline.spans for timeline in timelines):
        raise ArgumentError("timelines", [t.title for t in timelines], "give at least one with a task in it")
    from matplotlib.figure import Figure

    rows = [max(1, len(timeline.lanes)) for timeline in timelines]
    height = sum(0.34 * count + 0.62 for count in rows) + 0.8
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")
    grid = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=[r + 1.2 for r in rows])
    longest = max(timeline.makespan for timeline in timelines) or 1.0
    unit, scale = _time_unit(longest)
    for axes, timeline in zip(grid[:, 0], timelines, strict=True):
        _draw(axes, timeline, scale, longest)
    last = grid[-1, 0]
    last.set_xlabel(f"time [{unit}]")
    last.set_xlim(0, longest * scale)
    _legend(figure, timelines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ArgumentError("path", str(path), f"cannot be written: {error.strerror}") from None


def _legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    used = {span.task.kind for timeline in timelines for span in timeline.spans if span.end > span.start}
    names = {**NAMES, Kind.X: "X backward"} if Kind.W not in used else NAMES
    handles = [Patch(color=COLOURS[kind], label=names[kind]) for kind in COLOURS if kind in used]
    handles.append(Patch(color=_IDLE, label="idle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)


def _draw(axes: Axes, timeline: Timeline, scale: float, longest: float) -> None:
    by_lane: dict[str, list[Span]] = {name: [] for name, _ in timeline.lanes}
    for span in timeline.spans:
        if span.end > span.start:
            by_lane[span.lane].append(span)
    pixels = _PLOT_PIXELS / longest
    many = any(span.task.microbatch for span in timeline.spans)
    for row, spans in enumerate(by_lane.values()):
        axes.broken_barh([(0, timeline.makespan * scale)], (row - 0.4, 0.8), facecolors=_IDLE)
        boxes = list(_boxes(spans, pixels, many_microbatches=many))
        for kind in Kind:
            for odd in (False, True):
                drawn = [box for box in boxes if box.kind is kind and box.step % 2 == odd]
                axes.broken_barh(
                    [(box.start * scale, (box.end - box.start) * scale) for box in drawn],
                    (row - 0.4, 0.8),
                    facecolors=_lighter(COLOURS[kind]) if odd else COLOURS[kind],
                    edgecolors="white",
                    linewidth=0.4 if _wide(drawn, pixels) else 0.0,
                )
        for box in boxes:
            if box.text and (box.end - box.start) * pixels > _DIGIT_PIXELS * (len(box.text) + 0.5):
                axes.text((box.start + box.end) / 2 * scale, row, box.text, ha="center", va="center",
                          fontsize=6.5, color="black" if box.step % 2 or box.kind is Kind.U else "white")  # fmt: skip
    axes.set_yticks(range(len(by_lane)), labels=list(by_lane), fontsize=8)
    axes.set_ylim(len(by_lane) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    unit, factor = _time_unit(timeline.step_time)
    axes.set_title(f"{timeline.title}: {timeline.step_time * factor:.4g} {unit} per step", loc="left", fontsize=10)


def _wide(boxes: Sequence[_Box], pixels: float) -> bool:
    """Whether outlines would still leave colour between them."""
    return bool(boxes) and min(box.end - box.start for box in boxes) * pixels > _NARROW_PIXELS


def _boxes(spans: Iterable[Span], pixels: float, *, many_microbatches: bool) -> Iterable[_Box]:
    """Joins neighbours that belong together: one micro-batch's layers, or what is too narrow to see."""
    current: _Box | None = None
    for span in spans:
        task = span.task
        text = str(task.microbatch) if many_microbatches and task.kind is not Kind.U else ""
        box = _Box(task.kind, text or str(task.layer), task.step, span.start, span.end)
        if current is not None and current.kind is box.kind and current.step == box.step:
            adjacent = (box.start - current.end) * pixels < 0.5
            narrow = (box.end - box.start) * pixels < _NARROW_PIXELS
            if adjacent and ((text and current.text == box.text) or (not text and narrow)):
                current = _Box(box.kind, text, box.step, current.start, box.end)
                continue
        if current is not None:
            yield current
        current = box
    if current is not None:
        yield current


def _lighter(colour: str) -> str:
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(channel + 255) // 2:02x}" for channel in channels)


def _time_unit(longest: float) -> tuple[str, float]:
    """A unit in which a duration has one to three digits before the point."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if longest * scale >= 1:
            return unit, scale
    return "µs", 1e6
