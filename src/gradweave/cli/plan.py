"""``gradweave plan``: what a model's tasks cost on this machine, and what schedules would make of them."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

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
from gradweave.cli.tables import print_results, seconds_text, share_done

_BLOCKS, _STEPS = 5, 4


def plan_command(
    model: ModelOption = "mlp",
    optimizer: OptimizerOption = "adamw",
    batch: BatchOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder for costs.json and timelines.png.")] = None,
) -> None:
    """Measure the tasks of a training step and predict what each schedule would make of them.

    Without a measurement of how tasks run beside each other, none is promised an overlap: the figures
    are what reordering alone can do.
    """
    from gradweave.compare.run import make_batches
    from gradweave.compare.trial import Trial
    from gradweave.compare.variants import baseline_of
    from gradweave.profile import measure_costs
    from gradweave.schedule import plan, save_timelines, single
    from gradweave.schedule.planning import policies_for

    setting = make_setting(model, optimizer, batch, dtype, device)
    stock = baseline_of(optimizer)
    with share_done(quiet=not sys.stderr.isatty()) as progress, fits_in_memory(setting):
        trial, batches = Trial(stock, stock, setting), make_batches(setting)
        progress("timing stock steps", 0.0)
        trial.run_block(batches, _STEPS, timed=False)
        for _ in range(_BLOCKS):
            trial.run_block(batches, _STEPS, timed=True)
        costs = measure_costs(trial.model, trial.loss, trial.variant.optimizer, batches[0], progress=progress)
    graph = single(costs, steps=2)
    schedules = [plan(graph, policy=policy.name) for policy in policies_for(graph.family)]
    results = [(schedule, schedule.simulate()) for schedule in schedules]
    if out is not None:
        make_folder(out)
        costs.save(out / "costs.json")
        save_timelines([timeline for _, timeline in results], out / "timelines.png")
    print_results(graph, results, out)
    measured, predicted = median(trial.blocks), results[0][1].step_time
    typer.echo(
        f"a stock step took {seconds_text(measured)}; its tasks, one after the other, {seconds_text(predicted)} "
        f"({predicted / measured - 1:+.0%})"
    )
