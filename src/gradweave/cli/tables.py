"""Tables and progress bars on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from gradweave.schedule import Schedule, TaskGraph, Timeline


@contextmanager
def progress(names: Sequence[str], doing: str, *, quiet: bool) -> Iterator[Iterator[str]]:
    """Goes through ``names`` under a progress bar on stderr that says which one is under way."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(doing, total=len(names))

        def each() -> Iterator[str]:
            for name in names:
                bar.update(task, description=f"{doing} {name}")
                yield name
                bar.advance(task)

        yield each()


@contextmanager
def share_done(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr that is told what is going on, and the share that is done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("preparing", total=1.0)
        yield lambda doing, done: bar.update(task, description=doing, completed=done)


def print_results(graph: TaskGraph, results: Sequence[tuple[Schedule, Timeline]], out: Path | None) -> None:
    """One row per policy, compared with the first."""
    cluster = graph.cluster
    table = Table(
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title=f"{graph.family}: {escape(graph.costs.name)}, {graph.layers} layers, {cluster.devices} device(s)",
    )
    table.add_column("policy", overflow="fold")
    for column in ("step", "speed-up", "makespan", "peak", "idle", "exposed"):
        table.add_column(column, justify="right", no_wrap=True)
    first = results[0][1].step_time
    for schedule, timeline in results:
        compute = [name for name, resource in timeline.lanes if resource in schedule.graph.devices]
        idle = sum(timeline.idle[name] for name in compute) / len(compute)
        found = " ".join(f"{key}={value}" for key, value in schedule.options.items() if "byte" not in key)
        table.add_row(
            f"{schedule.policy} {found}" if found else schedule.policy,
            seconds_text(timeline.step_time),
            f"{first / timeline.step_time:.3f}x" if timeline.step_time else "-",
            seconds_text(timeline.makespan),
            bytes_text(timeline.peak_bytes),
            f"{idle:.1%}",
            seconds_text(timeline.exposed_communication),
        )
    console = Console(soft_wrap=True)
    console.print(table)
    if out is not None:
        console.print(f"wrote {out}", highlight=False, markup=False)


def seconds_text(seconds: float) -> str:
    """A duration in the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def bytes_text(size: float) -> str:
    """A size in the unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
