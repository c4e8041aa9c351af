"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradweave.schedule import Schedule, TaskGraph, Timeline

_COLUMNS = ("policy", "step", "speed-up", "makespan", "peak", "idle", "exposed")


def print_results(graph: TaskGraph, results: Sequence[tuple[Schedule, Timeline]], out: Path | None) -> None:
    """Print one row per policy, compared with the first."""
    cluster = graph.cluster
    table = Table(
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title=f"{graph.family}: {escape(graph.costs.name)}, {counted(graph.layers, 'layer')}, "
        f"{counted(cluster.devices, 'device')}",
    )
    rows = [_cells(schedule, timeline, results[0][1].step_time) for schedule, timeline in results]
    console = Console(soft_wrap=True)
    widths = [max(len(column), *(len(cells[index]) for cells in rows)) for index, column in enumerate(_COLUMNS)]
    # On a narrow terminal Rich folds a column down to single characters: the first column is folded by words here.
    longest_word = max(len(word) for text in (_COLUMNS[0], *(cells[0] for cells in rows)) for word in text.split())
    left = console.width - sum(widths[1:]) - len(_COLUMNS) - 1
    widths[0] = max(longest_word, min(left, widths[0]))
    for index, (column, width) in enumerate(zip(_COLUMNS, widths, strict=True)):
        table.add_column(column, justify="right" if index else "left", no_wrap=True, min_width=width)
    for name, *figures in rows:
        table.add_row("\n".join(wrap(name, widths[0])), *figures)
    console.print(table)
    if out is not None:
        console.print(f"wrote {out}", highlight=False, markup=False)


def _cells(schedule: Schedule, timeline: Timeline, first: float) -> list[str]:
    """Return the row of a policy; ``first`` is the step time to compare with."""
    compute = [name for name, resource in timeline.lanes if resource in schedule.graph.devices]
    idle = sum(timeline.idle[name] for name in compute) / len(compute)
    found = " ".join(f"{key}={value}" for key, value in schedule.options.items() if "byte" not in key)
    return [
        f"{schedule.policy} {found}" if found else schedule.policy,
        seconds_text(timeline.step_time),
        f"{first / timeline.step_time:.3f}x" if timeline.step_time else "-",
        seconds_text(timeline.makespan),
        bytes_text(timeline.peak_bytes),
        f"{idle:.1%}",
        seconds_text(timeline.exposed_communication),
    ]


def seconds_text(seconds: float) -> str:
    """Return a duration in a suitable unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1 or not seconds:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def bytes_text(size: float) -> str:
    """Return a size in a suitable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def counted(number: int, noun: str) -> str:
    """Return a number of things, as in "1 layer" and "2 layers"."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"
