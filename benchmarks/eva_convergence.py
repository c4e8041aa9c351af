"""Convergence of the Eva family against first-order and dense second-order optimizers, on real data.

    python benchmarks/eva_convergence.py run --task autoencoder --data FOLDER --results FILE.csv --minutes 8
    python benchmarks/eva_convergence.py time --task autoencoder --data FOLDER --results FILE-times.csv
    python benchmarks/eva_convergence.py draw --task autoencoder --results FILE.csv --times FILE-times.csv

Every optimizer has the same number of trials: four learning rates of its own, then two more (the best one times
and over 1.5, or two refresh intervals), all from one seed; the best goes on to three seeds, with schedules of
three lengths. Refreshing in every step makes a step many times as long, and does not go on. Trials that the
results hold already are left out, so that a table can be filled in several runs. On a GPU a step is one CUDA
graph where the optimizer permits it, and ``--together`` trials run side by side: only their losses are read,
``time`` measures steps by themselves.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from eva_contenders import Contender, contenders
from eva_tasks import TASKS, Task
from step_variants import captured

from gradweave.compare.run import environment

SEEDS = (0, 1, 2)
FIRST_INTERVAL = 10


@dataclass(frozen=True)
class Trial:
    """One training."""

    contender: str
    lr: float
    interval: int
    length: int
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(map(str, (self.contender, self.lr, self.interval, self.length, self.seed)))


FIELDS = ("contender", "lr", "interval", "length", "seed")


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def key_of(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[field] for field in FIELDS)


def final(rows: list[dict[str, str]], trial: Trial) -> float:
    """The figure at the end of a trial; not a number if it diverged."""
    own = [row for row in rows if key_of(row) == trial.key]
    return float(own[-1]["test"])


def plan(task: Task, who: dict[str, Contender], rows: list[dict[str, str]]) -> Iterator[Trial]:
    """The trials that are still to be run, as far as those behind them are known."""
    known = {key_of(row) for row in rows}
    for name, contender in who.items():
        stages = _stages(name, contender, task, rows)
        yield from next((missing for stage in stages if (missing := [t for t in stage if t.key not in known])), [])


def _stages(name: str, contender: Contender, task: Task, rows: list[dict[str, str]]) -> Iterator[Sequence[Trial]]:
    """Trials, each stage of which needs what the one before it gave."""
    length = task.lengths[0]
    grid = [Trial(name, lr, FIRST_INTERVAL, length, 0) for lr in contender.rates]
    yield grid
    lead = best(task, rows, grid)
    if contender.intervals:
        more = [Trial(name, lead.lr, interval, length, 0) for interval in contender.intervals]
    else:
        moved = [float(f"{lead.lr * factor:.4g}") for factor in (1.5, 1 / 1.5)]
        more = [Trial(name, lr, FIRST_INTERVAL, length, 0) for lr in moved]
    yield more
    lead = best(task, rows, [trial for trial in grid + more if trial.interval > 1])
    yield [Trial(name, lead.lr, lead.interval, n, seed) for n in task.lengths for seed in SEEDS]


def best(task: Task, rows: list[dict[str, str]], trials: list[Trial]) -> Trial:
    def worth(trial: Trial) -> float:
        figure = final(rows, trial)
        if math.isnan(figure):
            return math.inf
        return figure if task.lower_is_better else -figure

    return min(trials, key=worth)


class Training:
    """A model with its optimizers, one step at a time."""

    def __init__(self, task: Task, contender: Contender, trial: Trial, device: str) -> None:
        torch.manual_seed(trial.seed)
        self.task = task
        self.model = task.make_model()
        self.optimizers = contender.make(self.model, trial.lr, trial.interval)
        self.generator = torch.Generator().manual_seed(1000 + trial.seed)
        self.groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        self.rates = [float(group["lr"]) for group in self.groups]
        is_captured = contender.captured and device == "cuda"
        if is_captured:
            for group in self.groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=device)
        self.take = captured(self._train) if is_captured else lambda batch: self._train(*batch)

    def _train(self, *batch: torch.Tensor) -> torch.Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.task.loss(self.model, *batch)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def step(self, share: float) -> torch.Tensor:
        """A step at a share of the learning rate."""
        for group, lr in zip(self.groups, self.rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr * share)
            else:
                group["lr"] = lr * share
        return self.take(self.task.batch(self.generator))

    def test(self) -> float:
        self.model.eval()
        with torch.no_grad():
            figure = self.task.test(self.model)
        self.model.train()
        return figure


def share_of(step: int, length: int) -> float:
    """Five percent of warm-up, then linear to zero, for everybody."""
    warm = max(1, length // 20)
    return min((step + 1) / warm, (length - step) / (length - warm + 1), 1.0)


def train(task: Task, contender: Contender, trial: Trial, device: str, until: float) -> list[dict[str, Any]] | None:
    """The figures of a trial; None if it is not done by a time of the clock."""
    training = Training(task, contender, trial, device)
    every = max(1, trial.length // task.points)
    about = {**dict(zip(FIELDS, trial.key, strict=True)), "metric": task.metric}
    where = environment(torch.device(device))
    rows = []
    for step in range(trial.length):
        loss = training.step(share_of(step, trial.length))
        at_end = step + 1 == trial.length
        if at_end or (step + 1) % every == 0:
            value = float(loss)
            figure = training.test() if math.isfinite(value) else math.nan
            rows.append({**about, "step": step + 1, "train_loss": f"{value:.6g}", "test": f"{figure:.6g}", **where})
            if not math.isfinite(value):
                break
            if time.time() > until and not at_end:
                return None
    return rows


class Worker:
    """Trains in a process of a pool, with the data that was read when it began."""

    task: Task
    who: dict[str, Contender]
    device: str

    @classmethod
    def begin(cls, name: str, data: Path, device: str, toy: bool) -> None:
        torch.backends.cudnn.benchmark = True
        cls.task, cls.who, cls.device = TASKS[name](data, device, toy=toy), contenders(name), device

    @classmethod
    def train(cls, trial: Trial, until: float) -> tuple[list[dict[str, Any]] | None, float]:
        gc.collect()  # a graph of the last training that is destroyed while the next one is captured would spoil that
        began = time.perf_counter()
        rows = train(cls.task, cls.who[trial.contender], trial, cls.device, until)
        return rows, time.perf_counter() - began


def run(name: str, task: Task, arguments: argparse.Namespace, device: str) -> None:
    """Trials side by side, until all are in or the time is up; what has failed once is not tried again."""
    who = {
        key: one for key, one in contenders(name).items() if arguments.contender is None or key in arguments.contender
    }
    until = time.time() + 60 * arguments.minutes
    running: dict[Future[Any], Trial] = {}
    failed: set[str] = set()
    with ProcessPoolExecutor(
        arguments.together,
        mp_context=get_context("spawn"),
        initializer=Worker.begin,
        initargs=(name, arguments.data, device, arguments.toy),
    ) as pool:
        while True:
            if time.time() < until:
                begun = {trial.key for trial in running.values()}
                able = {key: value for key, value in who.items() if key not in failed}
                left = [trial for trial in plan(task, able, read(arguments.results)) if trial.key not in begun]
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
                rows, seconds = future.result()
                if rows is not None:
                    append(arguments.results, rows)
                print(trial, rows[-1]["test"] if rows else "not done in time", f"{seconds:.0f} s", flush=True)


def measure(name: str, task: Task, path: Path, device: str) -> None:
    """Milliseconds of a step of each optimizer, by itself: the median of rounds."""
    known = {row["contender"] + row["interval"] for row in read(path)}
    for contender_name, contender in contenders(name).items():
        for interval in (FIRST_INTERVAL, *contender.intervals):
            if contender_name + str(interval) in known:
                continue
            training = Training(task, contender, Trial(contender_name, 1e-4, interval, 1, 0), device)
            for _ in range(5):
                training.step(1.0)
            steps, times = (20 if not contender.intervals else max(5, interval)), []
            for _ in range(5 if steps > 5 else 3):
                synchronize(device)
                began = time.perf_counter()
                for _ in range(steps):
                    training.step(1.0)
                synchronize(device)
                times.append(1e3 * (time.perf_counter() - began) / steps)
            row = {"contender": contender_name, "interval": interval, "ms": f"{median(times):.4f}"}
            append(
                path,
                [
                    {
                        **row,
                        "ms_low": f"{min(times):.4f}",
                        "ms_high": f"{max(times):.4f}",
                        **environment(torch.device(device)),
                    }
                ],
            )
            print(row, flush=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def finals_of(rows: list[dict[str, str]], name: str, length: int) -> list[list[dict[str, str]]]:
    """The curves of the seeds that a contender went on to, of one length; the best, where its grid was made wider."""
    curves: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        if row["contender"] == name and int(row["length"]) == length:
            curves.setdefault(key_of(row), []).append(row)
    went_on = {key[1:3] for key in curves if key[4] != "0"}
    sets = [[curve for key, curve in curves.items() if key[1:3] == setting] for setting in went_on]
    sign = -1 if "accuracy" in rows[0]["metric"] else 1
    return min(sets, key=lambda chosen: sign * sum(float(curve[-1]["test"]) for curve in chosen), default=[])


def draw(path: Path, times: Path) -> None:
    """Mean and spread of the seeds, against steps and, where steps were timed, against seconds."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    rows = read(path)
    ms = {(row["contender"], row["interval"]): float(row["ms"]) for row in read(times) if "ms" in row}
    names = list(dict.fromkeys(row["contender"] for row in rows))
    length = int(rows[0]["length"])
    figure = Figure(figsize=(11 if ms else 7, 4.2), dpi=130, layout="constrained")
    by_steps, *by_seconds = figure.subplots(1, 2 if ms else 1, sharey=True, squeeze=False)[0]
    for number, name in enumerate(names):
        curves = finals_of(rows, name, length)
        if not curves:
            continue
        steps = [int(row["step"]) for row in curves[0]]
        values = torch.tensor([[float(row["test"]) for row in curve] for curve in curves if len(curve) == len(steps)])
        low, mean, high = values.min(0).values, values.mean(0), values.max(0).values
        per_step = ms.get((name, curves[0][0]["interval"]))
        for axes, factor in ((by_steps, 1.0), *((axes, (per_step or 0) / 1e3) for axes in by_seconds)):
            if factor:
                at = [step * factor for step in steps]
                axes.plot(at, mean, label=f"{name}, lr {curves[0][0]['lr']}", linewidth=1.2, color=f"C{number}")
                axes.fill_between(at, low, high, alpha=0.15, color=f"C{number}")
    by_steps.set_xlabel("steps")
    for axes in by_seconds:
        axes.set_xlabel("seconds: steps times the step's time by itself")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    by_steps.set_ylabel(rows[0]["metric"])
    if "error" in rows[0]["metric"]:
        by_steps.set_yscale("log")
    by_steps.legend(fontsize=7)
    figure.suptitle(f"mean and range of {len(SEEDS)} seeds; {rows[0]['device']}, torch {rows[0]['torch']}", fontsize=9)
    figure.savefig(path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "time", "draw"))
    parser.add_argument("--task", choices=tuple(TASKS), required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--times", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--contender", action="append", help="once for each that is to run; all unless given")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--together", type=int, default=1, help="trials at a time")
    parser.add_argument("--toy", action="store_true", help="small networks and batches, to see that everything runs")
    arguments = parser.parse_args()
    if arguments.what == "draw":
        draw(arguments.results, arguments.times or arguments.results)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    task = TASKS[arguments.task](arguments.data, device, toy=arguments.toy)
    if arguments.what == "run":
        run(arguments.task, task, arguments, device)
    else:
        measure(arguments.task, task, arguments.results, device)


if __name__ == "__main__":
    main()
