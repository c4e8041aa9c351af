"""Gantt charts of timelines: a row per stream and link, a colour per kind of task."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
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
"""About the width of the axes; the rest holds the names of the rows."""
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
    """Draw timelines above one another on one time axis."""
    _check(timelines, path)
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
    _save(figure, path)


def save_overlay(pairs: Sequence[tuple[Timeline, Timeline]], path: str | Path) -> None:
    """Draw predicted timelines and measured ones over each other, stream by stream.

    The upper half of a row is predicted, the lower half measured; both begin with the forward of the second step, or of
    the first if there is only one. A measured stream is drawn with the predicted one whose name ends in the same word.

    Args:
        pairs: A predicted and a measured timeline of the same work, for each panel.
        path: Ends in ``.png``, ``.svg`` or ``.pdf``.
    """
    path = Path(path)
    shown = [(_steady(predicted), _steady(measured)) for predicted, measured in pairs]
    drawn = [timeline for pair in shown for timeline in pair]
    _check(drawn, path)
    from matplotlib.figure import Figure

    rows = [len(_shared_lanes(*pair)) for pair in shown]
    height = sum(0.6 * count + 0.62 for count in rows) + 0.8
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")
    grid = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=[r + 0.7 for r in rows])
    longest = max(timeline.makespan for timeline in drawn) or 1.0
    unit, scale = _time_unit(longest)
    for axes, (predicted, measured), whole in zip(grid[:, 0], shown, pairs, strict=True):
        lanes = _shared_lanes(predicted, measured)
        for timeline, top in ((predicted, -0.42), (measured, 0.02)):
            _draw_rows(axes, _rows_by_word(timeline, lanes), timeline.makespan, scale, longest, (top, 0.4))
        _label_rows(axes, [f"{lane}\npredicted / measured" for lane in lanes])
        times = whole[0].step_time, whole[1].step_time
        off = f", {times[0] / times[1] - 1:+.0%}" if times[1] else ""
        own_unit, factor = _time_unit(max(times) or 1.0)
        text = f"{times[0] * factor:.4g} {own_unit} predicted, {times[1] * factor:.4g} {own_unit} measured{off}"
        axes.set_title(f"{whole[0].title}: {text}", loc="left", fontsize=10)
    grid[-1, 0].set_xlabel(f"time [{unit}]")
    grid[-1, 0].set_xlim(0, longest * scale)
    _legend(figure, drawn)
    _save(figure, path)


def _steady(timeline: Timeline) -> Timeline:
    """Return the part from the forward of the second step, if there is one, to the end of the forward after it."""
    steps = sorted({span.task.step for span in timeline.spans if span.task.kind is Kind.F})
    if len(steps) < 2:
        return timeline
    begin = min(s.start for s in timeline.spans if s.task.kind is Kind.F and s.task.step == steps[1])
    last = steps[2] if len(steps) > 2 else steps[1]
    end = max(s.end for s in timeline.spans if s.task.step < last or (s.task.kind is Kind.F and s.task.step == last))

    def is_shown(span: Span) -> bool:
        # Tasks of no duration at the very beginning may still belong to the step before.
        return begin <= span.start and span.end <= end and (span.end > begin or span.task.step >= steps[1])

    spans = tuple(s._replace(start=s.start - begin, end=s.end - begin) for s in timeline.spans if is_shown(s))
    return replace(timeline, spans=spans)


def _word(lane: str) -> str:
    """Return the last word of a lane's name, by which predicted and measured ones are matched."""
    return lane.rpartition(" ")[2]


def _shared_lanes(predicted: Timeline, measured: Timeline) -> list[str]:
    """Return the names of the rows: the predicted streams, and measured ones that match none of them."""
    names = [name for name, _ in predicted.lanes]
    known = {_word(name) for name in names}
    return names + [name for name, _ in measured.lanes if _word(name) not in known]


def _rows_by_word(timeline: Timeline, lanes: Sequence[str]) -> list[list[Span]]:
    """Return the spans of a timeline by row."""
    rows: dict[str, list[Span]] = {_word(lane): [] for lane in lanes}
    for span in timeline.spans:
        if span.end > span.start:
            rows[_word(span.lane)].append(span)
    return list(rows.values())


def _check(timelines: Sequence[Timeline], path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ArgumentError("path", str(path), f"end it in {', '.join(SUFFIXES)}")
    if not timelines or not any(timeline.spans for timeline in timelines):
        raise ArgumentError("timelines", [t.title for t in timelines], "give at least one with a task in it")


def _save(figure: Figure, path: Path) -> None:
    from matplotlib import rc_context

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Neither a date nor random ids: the same timelines give the same file, which version control can tell.
        with rc_context({"svg.hashsalt": "gradweave"}):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ArgumentError("path", str(path), f"cannot be written: {error.strerror}") from None


def _legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    """Add a legend of the kinds that are drawn, and of what shades and numbers mean."""
    from matplotlib.patches import Patch

    shown = [span for timeline in timelines for span in timeline.spans if span.end > span.start]
    used = {span.task.kind for span in shown}
    # A recorder that does not see weight gradients apart records all of backward as X.
    names = {**NAMES, Kind.X: "X backward"} if Kind.W not in used else NAMES
    handles = [Patch(color=COLOURS[kind], label=names[kind]) for kind in COLOURS if kind in used]
    handles.append(Patch(color=_IDLE, label="idle"))
    notes = ["lighter: every second step"] if len({span.task.step for span in shown}) > 1 else []
    if any(span.task.microbatch for span in shown):
        notes.append("numbers: micro-batches")
    elif any(_numbered_kinds([timeline.spans]) for timeline in timelines):
        notes.append("numbers: layers")
    if notes:
        handles.append(Patch(color="none", label="; ".join(notes)))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.5,
        columnspacing=1.5,
    )


def _draw(axes: Axes, timeline: Timeline, scale: float, longest: float) -> None:
    """Draw the lanes of one timeline, with its step time as the title."""
    by_lane: dict[str, list[Span]] = {name: [] for name, _ in timeline.lanes}
    for span in timeline.spans:
        if span.end > span.start:
            by_lane[span.lane].append(span)
    _draw_rows(axes, list(by_lane.values()), timeline.makespan, scale, longest, (-0.4, 0.8))
    _label_rows(axes, list(by_lane))
    unit, factor = _time_unit(timeline.step_time)
    axes.set_title(f"{timeline.title}: {timeline.step_time * factor:.4g} {unit} per step", loc="left", fontsize=10)


def _draw_rows(
    axes: Axes,
    rows: Sequence[Sequence[Span]],
    makespan: float,
    scale: float,
    longest: float,
    place: tuple[float, float],
) -> None:
    """Draw the spans of each row as bars.

    Args:
        axes: The panel.
        rows: Spans by row.
        makespan: Seconds that are drawn as idle where nothing else is.
        scale: Units of the time axis per second.
        longest: Seconds that fill the width.
        place: Top of the bars, from the middle of their row, and their height.
    """
    top, height = place
    pixels = _PLOT_PIXELS / longest
    many = any(span.task.microbatch for spans in rows for span in spans)
    numbered = _numbered_kinds(rows)
    for row, spans in enumerate(rows):
        axes.broken_barh([(0, makespan * scale)], (row + top, height), facecolors=_IDLE)
        boxes = list(_boxes(spans, pixels, many_microbatches=many, numbered=numbered))
        # One collection per kind and shade: an artist for each of thousands of boxes would be slow to draw.
        for kind in Kind:
            for odd in (False, True):
                drawn = [box for box in boxes if box.kind is kind and box.step % 2 == odd]
                axes.broken_barh(
                    [(box.start * scale, (box.end - box.start) * scale) for box in drawn],
                    (row + top, height),
                    facecolors=_lighter(COLOURS[kind]) if odd else COLOURS[kind],
                    edgecolors="white",
                    linewidth=0.4 if _has_room_for_outlines(drawn, pixels) else 0.0,
                )
        for box in boxes:
            if box.text and (box.end - box.start) * pixels > _DIGIT_PIXELS * (len(box.text) + 0.5):
                axes.text(
                    (box.start + box.end) / 2 * scale,
                    row + top + height / 2,
                    box.text,
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="black" if box.step % 2 or box.kind is Kind.U else "white",
                )


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels=list(labels), fontsize=8)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _has_room_for_outlines(boxes: Sequence[_Box], pixels: float) -> bool:
    """Return whether outlines would leave colour between them."""
    return bool(boxes) and min(box.end - box.start for box in boxes) * pixels > _NARROW_PIXELS


def _numbered_kinds(rows: Iterable[Iterable[Span]]) -> set[Kind]:
    """Return the kinds with tasks of several layers: where one task stands for all layers, its number means nothing."""
    layers: dict[Kind, set[int]] = {}
    for spans in rows:
        for span in spans:
            if span.end > span.start and not span.task.note:
                layers.setdefault(span.task.kind, set()).add(span.task.layer)
    return {kind for kind, numbers in layers.items() if len(numbers) > 1}


def _boxes(
    spans: Iterable[Span], pixels: float, *, many_microbatches: bool, numbered: Collection[Kind]
) -> Iterable[_Box]:
    """Join neighbours that belong together: the layers of one micro-batch, or tasks too narrow to see.

    Args:
        spans: Spans of one row.
        pixels: Pixels per second.
        many_microbatches: Number boxes by micro-batch, not by layer.
        numbered: Kinds whose boxes are numbered by layer.
    """
    current: _Box | None = None
    for span in spans:
        task = span.task
        microbatch = str(task.microbatch) if many_microbatches and task.kind is not Kind.U else ""
        layer = str(task.layer) if task.kind in numbered and not task.note and not many_microbatches else ""
        box = _Box(task.kind, microbatch or layer, task.step, span.start, span.end)
        if current is not None and current.kind is box.kind and current.step == box.step:
            adjacent = (box.start - current.end) * pixels < 0.5
            narrow = (box.end - box.start) * pixels < _NARROW_PIXELS
            if adjacent and ((microbatch and current.text == box.text) or (not microbatch and narrow)):
                current = _Box(box.kind, microbatch, box.step, current.start, box.end)
                continue
        if current is not None:
            yield current
        current = box
    if current is not None:
        yield current


def _lighter(colour: str) -> str:
    """Return a colour halfway to white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(channel + 255) // 2:02x}" for channel in channels)


def _time_unit(longest: float) -> tuple[str, float]:
    """Return a unit in which a duration has one to three digits before the point, and its number per second."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if longest * scale >= 1:
            return unit, scale
    return "µs", 1e6
