"""``gradweave compare``: the same training, stock and woven, side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradweave.cli.settings import (
    BatchOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    OptimizerOption,
    fits_in_memory,
    make_folder,
    make_setting,
)
from gradweave.cli.tables import bytes_text, share_done

if TYPE_CHECKING:
    from gradweave.compare.run import Comparison, Result


def compare_command(
    model: ModelOption = "mlp",
    optimizer: OptimizerOption = "adamw",
    batch: BatchOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each mode.")] = 100,
    modes: Annotated[
        str,
        typer.Option(
            help="Of loop, foreach, fused, hook, backward, forward, auto, reorder, daso, data_parallel, compile, "
            "pipeline, eva, eva_f, eva_s; comma-separated."
        ),
    ] = "loop,backward,forward,auto",
    max_norm: Annotated[float | None, typer.Option(help="Clip gradients to this norm.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html, pictures and figures as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Train the same model on the same data, stock and woven, and compare."""
    from gradweave.compare.figures import save_figures
    from gradweave.compare.report import save_report
    from gradweave.compare.run import compare

    setting = make_setting(model, optimizer, batch, dtype, device, max_norm)
    names = [name.strip() for name in modes.split(",")]
    if max_norm is not None and modes == "loop,backward,forward,auto":
        names.remove("backward")
    quiet = as_json or not sys.stderr.isatty()
    with share_done(quiet=quiet) as progress, fits_in_memory(setting):
        result = compare(setting, names, steps=steps, progress=progress)
    if out is not None:
        make_folder(out)
        save_report(result, save_figures(result, out), out / "report.html")
        (out / "figures.json").write_text(json.dumps(result.as_dict(), indent=1) + "\n")
    if as_json:
        print(json.dumps(result.as_dict()))
        return
    _print(result, f"{setting.workload.name}, {optimizer}, batch {setting.batch}, {dtype}")
    if out is not None:
        typer.echo(f"wrote {out}/report.html")


def _print(result: Comparison, title: str) -> None:
    """A row per mode, what the woven ones do, and the verdict."""
    from gradweave.compare.variants import OTHER_RULES, WOVEN

    has_memory = result.setting.device.type == "cuda"
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    table.title = escape(f"{title}, {result.environment['device']}")
    table.add_column("mode", no_wrap=True, min_width=max(len(row.label) for row in result.results))
    columns = ["ms/step", "F/B/U ms", "per s", *(["memory"] if has_memory else []), "speed-up [95%]", "training"]
    rows = [_cells(row, has_memory) for row in result.results]
    for index, column in enumerate(columns):
        width = max(len(column), *(len(cells[index]) for cells in rows))
        table.add_column(column, justify="right", no_wrap=True, min_width=width)
    for row, cells in zip(result.results, rows, strict=True):
        table.add_row(row.label, *cells)
    console = Console(soft_wrap=True)
    console.print(table)
    for row in result.results:
        if row.label in (*WOVEN, "pipeline", *OTHER_RULES):
            console.print(f"{row.label}: {row.description}", highlight=False, markup=False)
    console.print(f"\n{result.verdict}", highlight=False, markup=False)


def _cells(row: Result, has_memory: bool) -> list[str]:
    ratio = row.speedup
    return [
        f"{row.milliseconds[1]:.2f}",
        "/".join(f"{part[1]:.1f}" for part in row.parts.values()) or "all in one",
        f"{row.throughput:.4g}",
        *([bytes_text(row.peak_bytes or 0)] if has_memory else []),
        f"{ratio.value:.3f}x [{ratio.low:.2f}, {ratio.high:.2f}]",
        row.sameness,
    ]
