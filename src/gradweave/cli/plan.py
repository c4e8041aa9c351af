"""``gradweave plan``: measured costs of a model's tasks, and the step times that schedules would give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

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
from gradweave.cli.tables import print_results, seconds_text

if TYPE_CHECKING:
    from gradweave.schedule import Timeline

PLAN_EPILOG = (
    "On a GPU, the overlap of weight gradients with other tasks is measured too. A CPU has no second stream: there, "
    "the figures show the effect of order alone."
)
_BLOCKS, _STEPS = 5, 4
_FILES = ("costs.json", "timelines.png", "predicted-and-measured.png")


def plan_command(
    model: ModelOption = "mlp",
    optimizer: OptimizerOption = "adamw",
    batch: BatchOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for costs.json, timelines.png and predicted-and-measured.png.")
    ] = None,
) -> None:
    """Measure the tasks of a training step and predict its time under each schedule."""
    if out is not None:
        make_folder(out, _FILES)
    from gradweave.compare.planned import measure_planned
    from gradweave.compare.run import make_batches
    from gradweave.compare.trial import Trial
    from gradweave.compare.variants import baseline_of
    from gradweave.profile import measure_costs
    from gradweave.schedule import plan, save_timelines, single
    from gradweave.schedule.picture import save_overlay
    from gradweave.schedule.policies import policies_for

    setting = make_setting(model, optimizer, batch, dtype, device)
    stock = baseline_of(setting.optimizer)
    with share_done(quiet=False) as progress, fits_in_memory(setting):
        trial, batches = Trial(stock, stock, setting), make_batches(setting)
        progress("timing stock steps", 0.0)
        trial.run_block(batches, _STEPS, timed=False)
        for _ in range(_BLOCKS):
            trial.run_block(batches, _STEPS, timed=True)
        costs = measure_costs(trial.model, trial.loss, trial.variant.optimizer, batches[0], progress=progress)
        if out is not None:
            progress("recording schedules", 0.9)
            measured = measure_planned(trial, batches, costs)
    graph = single(costs, steps=2)
    schedules = [plan(graph, policy=policy.name) for policy in policies_for(graph.family)]
    results = [(schedule, schedule.simulate()) for schedule in schedules]
    print_results(graph, results, None)
    stock_time, in_order = median(trial.blocks), results[0][1].step_time
    typer.echo(
        f"a stock step took {seconds_text(stock_time)}; its tasks, one after the other, {seconds_text(in_order)} "
        f"({in_order / stock_time - 1:+.0%})"
    )
    if setting.device.type != "cuda":
        typer.echo("a CPU has no second stream: no schedule is expected to be faster here")
    if out is not None:
        with writing(out):
            costs.save(out / "costs.json")
            drawn = [_on(setting.device.type, timeline) for _, timeline in results]
            save_timelines(drawn, out / "timelines.png")
            predicted = {schedule.policy: timeline for (schedule, _), timeline in zip(results, drawn, strict=True)}
            pairs = [(predicted[policy], timeline) for policy, timeline in measured.items()]
            save_overlay(pairs, out / "predicted-and-measured.png")
        typer.echo(f"wrote {out}")


def _on(device: str, timeline: Timeline) -> Timeline:
    """Return a timeline whose lanes are named after the measured device; graphs call every device a GPU."""
    if device == "cuda":
        return timeline

    def renamed(lane: str) -> str:
        return lane.replace("gpu0", "cpu")

    spans = tuple(span._replace(lane=renamed(span.lane)) for span in timeline.spans)
    return replace(timeline, spans=spans, lanes=tuple((renamed(lane), on) for lane, on in timeline.lanes))
