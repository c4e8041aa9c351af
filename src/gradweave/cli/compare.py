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
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gradweave.cli.tables import bytes_text
from gradweave.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from gradweave.compare.run import Comparison, Result

_DTYPES = ("float32", "bfloat16", "float16")


def compare_command(
    model: Annotated[
        str,
        typer.Option(
            help="Built-in model, package.module:factory, or torchvision:, timm: or transformers: and a name."
        ),
    ] = "mlp",
    optimizer: Annotated[str, typer.Option(help="sgd, adam, adamw, adagrad, rmsprop, adadelta or nadam.")] = "adamw",
    batch: Annotated[int | None, typer.Option(help="Samples per step; the model's own default if absent.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 or float16 by autocast.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each mode.")] = 100,
    modes: Annotated[
        str, typer.Option(help="Of loop, foreach, fused, hook, backward, forward, auto, compile; comma-separated.")
    ] = "loop,backward,forward,auto",
    max_norm: Annotated[float | None, typer.Option(help="Clip gradients to this norm.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html, pictures and figures as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Train the same model on the same data, stock and woven, and compare."""
    import torch

    from gradweave.compare.figures import save_figures
    from gradweave.compare.report import save_report
    from gradweave.compare.run import compare
    from gradweave.compare.trial import Setting
    from gradweave.compare.workloads import find_workload

    if dtype not in _DTYPES:
        raise ArgumentError("--dtype", dtype, f"use one of {', '.join(_DTYPES)}")
    if dtype == "float16":
        raise ArgumentError("--dtype", dtype, "needs gradient scaling, which this command does not do; use bfloat16")
    workload = find_workload(model)
    setting = Setting(
        workload,
        optimizer,
        workload.default_batch if batch is None else batch,
        _device(device),
        getattr(torch, dtype),
        max_norm,
    )
    names = [name.strip() for name in modes.split(",")]
    if max_norm is not None and modes == "loop,backward,forward,auto":
        names.remove("backward")
    quiet = as_json or not sys.stderr.isatty()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("preparing", total=1.0)
        try:
            result = compare(
                setting,
                names,
                steps=steps,
                progress=lambda doing, done: bar.update(task, description=doing, completed=done),
            )
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            raise ArgumentError("--batch", setting.batch, "does not fit into memory; give fewer samples") from None
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError("--out", str(out), f"cannot be made: {error.strerror}") from None
        save_report(result, save_figures(result, out), out / "report.html")
        (out / "figures.json").write_text(json.dumps(result.as_dict(), indent=1) + "\n")
    if as_json:
        print(json.dumps(result.as_dict()))
        return
    _print(result, f"{workload.name}, {optimizer}, batch {setting.batch}, {dtype}")
    if out is not None:
        typer.echo(f"wrote {out}/report.html")


def _print(result: Comparison, title: str) -> None:
    """A row per mode, what the woven ones do, and the verdict."""
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
        if row.label in ("backward", "forward", "auto"):
            console.print(f"{row.label}: {row.description}", highlight=False, markup=False)
    console.print(f"\n{result.verdict}", highlight=False, markup=False)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """A GPU has an error of its own for it; a CPU has a message."""
    import torch

    return isinstance(error, torch.cuda.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _cells(row: Result, has_memory: bool) -> list[str]:
    ratio = row.speedup
    return [
        f"{row.milliseconds[1]:.2f}",
        "/".join(f"{part[1]:.1f}" for part in row.parts.values()) or "one graph",
        f"{row.throughput:.4g}",
        *([bytes_text(row.peak_bytes or 0)] if has_memory else []),
        f"{ratio.value:.3f}x [{ratio.low:.2f}, {ratio.high:.2f}]",
        row.sameness,
    ]


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentError("--device", name, "use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device", name, "there is no CUDA device; use cpu")
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError("--device", name, "use cpu or cuda")
    return device
