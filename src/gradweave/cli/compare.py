"""``gradweave compare``: the same training, stock and woven, side by side."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradweave.cli.names import MODES
from gradweave.cli.progress import share_done
from gradweave.cli.settings import (
    BatchOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    OptimizerOption,
    fits_in_memory,
    make_folder,
    make_setting,
    writing,
)
from gradweave.cli.tables import bytes_text

if TYPE_CHECKING:
    from gradweave.compare.comparison import Comparison
    from gradweave.compare.results import Result
    from gradweave.compare.variants import Mode

_FILES = ("report.html", "figures.json", "step-times.png", "losses.png", "timelines.png", "timelines.json")
_DEFAULT_MODES = "loop,backward,forward,auto"


def compare_command(
    model: ModelOption = "mlp",
    optimizer: OptimizerOption = "adamw",
    batch: BatchOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each mode.")] = 100,
    modes: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(MODES)}.")] = _DEFAULT_MODES,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of --optimizer (default: one that suits it and the model).")
    ] = None,
    eva_lr: Annotated[
        float | None, typer.Option(help="Learning rate of eva, eva_f and eva_s (default: their own).")
    ] = None,
    max_norm: Annotated[float | None, typer.Option(help="Clip gradients to this norm.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html, pictures and figures (JSON).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Train the same model on the same data, stock and woven, and compare."""
    if out is not None:
        make_folder(out, _FILES)
    from gradweave.compare.figures import save_figures
    from gradweave.compare.report import save_report
    from gradweave.compare.run import compare

    setting = make_setting(model, optimizer, batch, dtype, device, max_norm, lr, eva_lr)
    names = [name.strip() for name in modes.split(",")]
    if max_norm is not None and modes == _DEFAULT_MODES:
        names.remove("backward")
    with share_done(quiet=as_json) as progress, fits_in_memory(setting):
        result = compare(setting, cast("list[Mode]", names), steps=steps, progress=progress)
    command = shlex.join(["gradweave", *sys.argv[1:]])
    # Measurements are shown before anything can go wrong with files.
    if as_json:
        print(json.dumps({"command": command, **result.as_dict()}, allow_nan=False))
    else:
        _print(result)
    if out is not None:
        with writing(out):
            save_report(result, save_figures(result, out), out / "report.html", command)
            figures = json.dumps({"command": command, **result.as_dict()}, indent=1, allow_nan=False)
            (out / "figures.json").write_text(f"{figures}\n")
        if not as_json:
            typer.echo(f"wrote {out}/report.html")
    if not result.is_finite:
        raise typer.Exit(1)


def _print(result: Comparison) -> None:
    """Print a row per mode, a line on each of gradweave's modes, and the verdict."""
    from gradweave.compare.variants import OTHER_RULES, WOVEN

    has_memory = result.setting.device.type == "cuda"
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    table.title = escape(result.title)
    table.add_column("mode", no_wrap=True, min_width=max(len(row.label) for row in result.results))
    columns = [
        "lr",
        "ms/step",
        "F/B/U ms",
        "samples/s",
        *(["memory"] if has_memory else []),
        "speed-up [95%]",
        "training",
    ]
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
    console.print()
    for finding in result.findings:
        console.print(f"- {finding}", highlight=False, markup=False)


def _cells(row: Result, has_memory: bool) -> list[str]:
    ratio = row.speedup
    return [
        f"{row.learning_rate:g}",
        f"{row.milliseconds[1]:.2f}",
        "/".join(f"{part[1]:.1f}" for part in row.parts.values()) or "all in one",
        f"{row.throughput:,.0f}" if row.throughput >= 100 else f"{row.throughput:.3g}",
        *([bytes_text(row.peak_bytes or 0)] if has_memory else []),
        f"{ratio.value:.3f}x [{ratio.low:.2f}, {ratio.high:.2f}]",
        row.sameness,
    ]
