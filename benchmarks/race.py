"""A race of optimizers on real data, each with as many trials over a rate and one more hyperparameter of its own.

    python benchmarks/race.py run --task autoencoder --data FOLDER --results FILE.csv --minutes 7 --together 4
    python benchmarks/race.py time --task autoencoder --data FOLDER --results FILE-times.csv --chosen FILE.csv
    python benchmarks/race.py table --results FILE.csv --times FILE-times.csv

Trials are short trainings from one seed, judged by a part of the training data that none is trained on; what is best
so far must have neighbours on either side of both hyperparameters, and grids grow until it has. The best setting is
then trained from three other seeds, and these are reported on the test data. Everybody has a schedule of 5% warm-up
and linear decay but K-FAC, which has no learning rate; weights shrink by the same share in a step. Muon, SOAP, Shampoo
and the Eva family run in one CUDA graph per step on a GPU, with decompositions of every tenth step outside of it; K-FAC
runs eagerly, since what it does differs from step to step.

On a GPU, each line within seven minutes and again until ``run`` has nothing left (finished trials are kept, so that
any of it can be cut short); the times within one minute:

    python benchmarks/race.py run --task autoencoder --data FOLDER --results RACE-autoencoder.csv --together 4
    python benchmarks/race.py run --task text --data FOLDER --results RACE-text.csv --together 4
    python benchmarks/race.py run --task cifar --data FOLDER --results RACE-cifar.csv --together 2
    python benchmarks/race.py time --task TASK --data FOLDER --results RACE-TASK-times.csv --chosen RACE-TASK.csv

On a CPU ``--task small`` takes some minutes and no data: the autoencoder of the package's own comparison.

With ``--together`` only losses are worth anything; ``time`` measures each optimizer by itself. ``--toy`` has batches of
250 on the autoencoder, and next to nothing elsewhere.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from eva_convergence import share_of
from eva_tasks import TASKS, Task
from race_contenders import CONTENDERS, SHRINKAGE, Contender, Training
from race_search import Point, is_at_edge, next_points
from tables import append, read

from gradweave.compare.run import environment

CHOICE, REPORT = "choice", "report"
CHOICE_SEED, REPORT_SEEDS = 0, (1, 2, 3)
CYCLE = 20
"""Steps after which what K-FAC, SOAP and Shampoo do begins again."""


@dataclass(frozen=True)
class Trial:
    """One training; those for a choice are judged by the validation part, those for the report by the test part."""

    contender: str
    rate: int
    value: int
    part: str
    seed: int
    steps: int

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, (self.contender, self.rate, self.value, self.part, self.seed, self.steps)))


KEY = ("contender", "rate_at", "value_at", "part", "seed", "steps")


def key_of(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[field] for field in KEY)


def worths(rows: list[dict[str, str]], name: str, steps: int) -> dict[Point, float]:
    """Return what a contender's trials gave on the validation part, the less the better."""
    found = {}
    for row in rows:
        if (row["contender"], row["part"], row["steps"]) == (name, CHOICE, str(steps)):
            figure = float(row["validation"]) * (-1 if "accuracy" in row["metric"] else 1)
            found[int(row["rate_at"]), int(row["value_at"])] = math.inf if math.isnan(figure) else figure
    return found


def missing_trials(name: str, rows: list[dict[str, str]], *, trials: int, steps: int) -> list[Trial]:
    """Return what is still to be run of a contender, as far as trials before have told."""
    contender, worth = CONTENDERS[name], worths(rows, name, steps)
    start = contender.values.index(contender.usual)
    places = next_points(worth, budget=trials, values=len(contender.values), start=start, safe=contender.safe)
    if places:
        return [Trial(name, *place, CHOICE, CHOICE_SEED, steps) for place in places]
    best = min(worth, key=worth.__getitem__)
    done = {key_of(row) for row in rows if row["step"] == row["steps"] or row["test"] == "nan"}
    reports = [Trial(name, *best, REPORT, seed, steps) for seed in REPORT_SEEDS]
    return [trial for trial in reports if trial.key not in done]


def begin(task: Task, name: str, contender: Contender, trial: Trial) -> tuple[torch.nn.Module, Training]:
    torch.manual_seed(trial.seed)
    model = task.make_model()
    rate, value = contender.rate_at(trial.rate), contender.values[trial.value]
    return model, contender.train(model, task, rate, value, SHRINKAGE[name])


def figure_of(model: torch.nn.Module, judge: Any) -> float:
    model.eval()
    with torch.no_grad():
        figure = judge(model)
    model.train()
    return float(figure)


def train(name: str, task: Task, trial: Trial, device: str, until: float) -> list[dict[str, Any]] | None:
    """Return the rows of a trial: its end, and of a reported one its way; None if it is not done by a time."""
    contender = CONTENDERS[trial.contender]
    model, training = begin(task, name, contender, trial)
    generator = torch.Generator().manual_seed(1000 + trial.seed)
    about = {
        "task": name, **dict(zip(KEY, trial.key, strict=True)), "rate": contender.rate_at(trial.rate),
        "other": contender.other, "value": contender.values[trial.value], "metric": task.metric,
    }  # fmt: skip
    rows = []
    every = max(1, trial.steps // task.points)
    for step in range(1, trial.steps + 1):
        try:
            loss = training.step(task.batch(generator), share_of(step - 1, trial.steps))
        except torch.linalg.LinAlgError:  # of a factor that is not finite
            loss = torch.tensor(math.nan)
        if step % every and step < trial.steps:
            continue
        is_finite = math.isfinite(float(loss))
        if step == trial.steps or not is_finite or trial.part == REPORT:
            judged = {"validation": math.nan, "test": math.nan}
            if is_finite:
                judged["validation"] = figure_of(model, task.validate)
                judged["test"] = figure_of(model, task.test) if trial.part == REPORT else math.nan
            figures = {key: f"{figure:.6g}" for key, figure in judged.items()}
            rows.append(
                {
                    **about,
                    "step": step,
                    "train_loss": f"{float(loss):.6g}",
                    **figures,
                    **environment(torch.device(device)),
                }
            )
        if not is_finite:
            break
        if time.time() > until and step < trial.steps:
            return None
    return rows


class Worker:
    """Trains in a process of a pool, with the data that was read when it began."""

    name: str
    task: Task
    device: str

    @classmethod
    def begin(cls, name: str, data: Path, device: str, toy: bool) -> None:
        torch.backends.cudnn.benchmark = True
        cls.name, cls.device, cls.task = name, device, TASKS[name](data, device, toy=toy, hold_out=True)

    @classmethod
    def train(cls, trial: Trial, until: float) -> tuple[list[dict[str, Any]] | None, float]:
        gc.collect()  # a graph of the last training that is destroyed while the next one is captured would spoil that
        began = time.perf_counter()
        return train(cls.name, cls.task, trial, cls.device, until), time.perf_counter() - began


def run(arguments: argparse.Namespace, device: str, steps: int) -> None:
    """Run trials, those first whose contender has had fewest; what has failed once is not tried again."""
    until = time.time() + 60 * arguments.minutes
    running: dict[Future[Any], Trial] = {}
    failed: set[str] = set()
    beginning = (arguments.task, arguments.data, device, arguments.toy)
    with ProcessPoolExecutor(
        arguments.together, mp_context=get_context("spawn"), initializer=Worker.begin, initargs=beginning
    ) as pool:
        while True:
            if time.time() < until:
                rows = read(arguments.results)
                begun = {trial.key for trial in running.values()}
                names = sorted(
                    (name for name in arguments.contender or CONTENDERS if name not in failed),
                    key=lambda name: len({key_of(row) for row in rows if row["contender"] == name}),
                )
                left = [
                    trial
                    for name in names
                    for trial in missing_trials(name, rows, trials=arguments.trials, steps=steps)
                    if trial.key not in begun
                ]
                for trial in left[: arguments.together - len(running)]:
                    running[pool.submit(Worker.train, trial, until)] = trial
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                trial = running.pop(future)
                if future.exception() is not None:
                    failed.add(trial.contender)
                    print(trial, "failed:", repr(future.exception())[-500:], flush=True)
                    continue
                made, seconds = future.result()
                if made is not None:
                    append(arguments.results, made)
                print(trial, made[-1]["validation"] if made else "not done in time", f"{seconds:.0f} s", flush=True)


def measure(arguments: argparse.Namespace, device: str, steps: int) -> None:
    """Measure milliseconds of a step of each optimizer by itself: the median of rounds of whole cycles."""
    known = {row["contender"] for row in read(arguments.results)}
    rows = read(arguments.chosen) if arguments.chosen else []
    task = TASKS[arguments.task](arguments.data, device, toy=arguments.toy, hold_out=True)
    for name, contender in CONTENDERS.items():
        if name in known or (arguments.contender and name not in arguments.contender):
            continue
        worth = worths(rows, name, steps) or {(0, contender.values.index(contender.usual)): 0.0}
        best = min(worth, key=worth.__getitem__)
        _, training = begin(task, arguments.task, contender, Trial(name, *best, REPORT, CHOICE_SEED, CYCLE))
        generator = torch.Generator().manual_seed(0)
        times = []
        for is_warm in (False, True, True, True):
            batches = [task.batch(generator) for _ in range(CYCLE)]
            synchronize(device)
            began = time.perf_counter()
            for batch in batches:
                training.step(batch, 0.1)
            synchronize(device)
            times += [1e3 * (time.perf_counter() - began) / CYCLE] if is_warm else []
        row = {"task": arguments.task, "contender": name, "ms": f"{median(times):.4f}", "ms_least": f"{min(times):.4f}"}
        append(arguments.results, [{**row, "ms_most": f"{max(times):.4f}", **environment(torch.device(device))}])
        print(row, flush=True)
        del training
        gc.collect()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def table(rows: Sequence[dict[str, str]], times: Sequence[dict[str, str]]) -> list[str]:
    """Return a line for each contender: its settings, its trials, its test figures, and the time of a step."""
    ms = {row["contender"]: float(row["ms"]) for row in times}
    lines = ["| optimizer | rate | its own | trials | test, mean and range of seeds | ms of a step |", "|" + "---|" * 6]
    for name in dict.fromkeys(row["contender"] for row in rows):
        steps = next(int(row["steps"]) for row in rows if row["contender"] == name)
        worth = worths(list(rows), name, steps)
        own = [row for row in rows if row["contender"] == name and row["part"] == REPORT]
        ends = [row for row in own if row["step"] == row["steps"] or row["test"] == "nan"]
        if not ends:
            continue
        figures = [float(row["test"]) for row in ends]
        said = f"{mean(figures):.4f} [{min(figures):.4f}, {max(figures):.4f}]"
        trials = f"{len(worth)}{', at the edge' if is_at_edge(worth) else ''}"
        settings = f"{ends[0]['rate']} | {ends[0]['other']} {ends[0]['value']}"
        lines.append(f"| {name} | {settings} | {trials} | {said} | {ms.get(name, math.nan):.3g} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "time", "table"))
    parser.add_argument("--task", choices=tuple(TASKS))
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--times", type=Path, help="for the table")
    parser.add_argument("--chosen", type=Path, help="results of `run`, whose best settings are timed")
    parser.add_argument("--data", type=Path)
    parser.add_argument(
        "--contender", action="append", choices=tuple(CONTENDERS), help="once for each; all unless given"
    )
    parser.add_argument("--trials", type=int, default=12, help="of each contender, before seeds are reported")
    parser.add_argument("--steps", type=int, help="of a training; the task's unless given")
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--together", type=int, default=1, help="trials at a time")
    parser.add_argument("--toy", action="store_true", help="smaller batches and networks")
    arguments = parser.parse_args()
    if arguments.what == "table":
        print("\n".join(table(read(arguments.results), read(arguments.times) if arguments.times else [])))
        return
    if arguments.task is None or (arguments.data is None and arguments.task != "small"):
        parser.error("give --task, and --data for tasks but the small one")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = arguments.steps or {"autoencoder": 300, "text": 800, "cifar": 600, "small": 200}[arguments.task]
    (run if arguments.what == "run" else measure)(arguments, device, steps)


if __name__ == "__main__":
    main()
