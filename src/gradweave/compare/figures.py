"""Pictures of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gradweave.compare.comparison import Comparison
from gradweave.compare.trial import PARTS
from gradweave.schedule.output import save_timelines
from gradweave.schedule.picture import COLOURS
from gradweave.schedule.tasks import Kind
from gradweave.schedule.timeline import Timeline

_PART_COLOURS = {"forward": COLOURS[Kind.F], "backward": COLOURS[Kind.X], "update": COLOURS[Kind.U]}
_WHOLE_COLOUR = "#999999"
_MOST_TIMES_LONGER = 2.0
"""Longest timeline that is drawn whole, in multiples of the shortest."""
_FEWEST_STEPS = 2
_THINNEST_LINE = 1.0
_MOST_EXTRA_WIDTH = 8.0
"""Points by which the widest of the loss curves on top of each other is wider than the thinnest."""


def save_figures(comparison: Comparison, folder: Path) -> list[Path]:
    """Write bars of step times, loss curves and measured timelines; return the paths of the pictures."""
    paths = [folder / name for name in ("step-times.png", "losses.png", "timelines.png")]
    _save_bars(comparison, paths[0])
    _save_losses(comparison, paths[1])
    timelines = [trial.timeline for trial in comparison.trials if trial.timeline is not None]
    save_timelines(_on_one_axis(timelines), paths[2])
    save_timelines(timelines, folder / "timelines.json")
    return paths


def _on_one_axis(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Cut slow timelines to their first steps, so that they do not shrink all others."""
    longest = _MOST_TIMES_LONGER * min(timeline.makespan for timeline in timelines)
    return [_first_steps(timeline, longest) for timeline in timelines]


def _first_steps(timeline: Timeline, seconds: float) -> Timeline:
    """Return the steps that end within some seconds, but no fewer than show one step from end to end."""
    ends: dict[int, float] = {}
    for span in timeline.spans:
        ends[span.task.step] = max(ends.get(span.task.step, 0.0), span.end)
    fitting = max(_FEWEST_STEPS, sum(end <= seconds for end in ends.values()))
    if fitting >= len(ends):
        return timeline
    kept = set(sorted(ends)[:fitting])
    spans = tuple(span for span in timeline.spans if span.task.step in kept)
    return replace(timeline, spans=spans, title=f"{timeline.title} (first {fitting} of {len(ends)} steps)")


def _save_bars(comparison: Comparison, path: Path) -> None:
    """Draw the step time of each variant with its spread, split as recorded steps were."""
    from matplotlib.figure import Figure

    results = comparison.results
    figure = Figure(figsize=(9, 0.45 * len(results) + 1.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    labelled: set[str] = set()

    def first_label(name: str) -> str | None:
        if name in labelled:
            return None
        labelled.add(name)
        return name

    for row, result in enumerate(results):
        low, middle, high = result.milliseconds
        whole = sum(part[1] for part in result.parts.values()) or 1.0
        left = 0.0
        if not result.parts:
            axes.barh(row, middle, color=_WHOLE_COLOUR, height=0.7, label=first_label("all in one"))
        for part in result.parts:
            width = middle * result.parts[part][1] / whole
            axes.barh(row, width, left=left, color=_PART_COLOURS[part], height=0.7, label=first_label(part))
            left += width
        axes.errorbar(middle, row, xerr=[[middle - low], [high - middle]], color="black", capsize=3, linewidth=1)
        text = f"{middle:.3g} ms, {result.speedup.value:.2f}x"
        axes.annotate(text, (high, row), (5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(results)), labels=[result.label for result in results])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(result.milliseconds[2] for result in results))
    axes.set_xlabel("milliseconds per step (bar: median; whiskers: 20th to 80th percentile)")
    figure.legend(frameon=False, loc="outside upper center", ncols=len(PARTS) + 1, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def _save_losses(comparison: Comparison, path: Path) -> None:
    """Draw loss curves on top of each other, each thinner than the one below, since equal ones would hide it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    count = len(comparison.results)
    extra = min(1.3, _MOST_EXTRA_WIDTH / max(1, count - 1))
    for number, result in enumerate(comparison.results):
        width = _THINNEST_LINE + extra * (count - 1 - number)
        axes.plot(range(1, len(result.losses) + 1), result.losses, linewidth=width, label=result.label, alpha=0.9)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
