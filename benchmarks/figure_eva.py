"""Tables of ``Eva`` and its kin: what they reach, and what a step costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping

from figures import Results, Row, interval, span, table

OPTIMIZERS = {
    "eva": "`Eva`", "eva-f": "`EvaF`", "eva-s": "`EvaS`", "muon": "Muon", "adamw": "AdamW",
    "eva reference": "`Eva(reference=True)`",
}  # fmt: skip
TASKS = {"autoencoder": "SGD with momentum", "text": "SGD", "cifar": "SGD with Nesterov's momentum"}
Finals = dict[int, list[float]]


def finals(results: Results, task: str) -> dict[str, tuple[str, str, Finals]]:
    """Read the last test figures of each optimizer, by length, at the rate that went on to three seeds.

    Where two rates did, the better one's.
    """
    runs: dict[tuple[str, str, str], Finals] = {}
    for row in results.rows(f"eva-{task}-h200.csv"):
        if row["step"] == row["length"]:
            lengths = runs.setdefault((row["contender"], row["lr"], row["interval"]), {})
            lengths.setdefault(int(row["length"]), []).append(float(row["test"]))
    best: dict[str, tuple[str, str, Finals]] = {}
    sign = -1 if task == "cifar" else 1
    for (name, lr, every), lengths in runs.items():
        if len(lengths[max(lengths)]) < 3:
            continue
        if name not in best or sign * _mean(lengths) < sign * _mean(best[name][2]):
            best[name] = lr, every, lengths
    return best


def _mean(lengths: Finals) -> float:
    return statistics.mean(lengths[max(lengths)])


def convergence_table(task: str) -> Callable[[Results], str]:
    def make(results: Results) -> str:
        times = results.rows(f"eva-{task}-times-h200.csv")
        rows, lengths = [], []
        for name, (lr, every, own) in sorted(
            finals(results, task).items(), key=lambda item: (-1 if task == "cifar" else 1) * _mean(item[1][2])
        ):
            lengths = sorted(own)
            ms = next(float(row["ms"]) for row in times if (row["contender"], row["interval"]) == (name, every))
            shown = {**OPTIMIZERS, "sgd": TASKS[task]}[name] + f", {lr}"
            rows.append([shown, *(_three(own[length], task) for length in lengths), f"{ms:.3g}"])
        return table(("optimizer, lr", *(f"{length} steps" for length in lengths), "ms of a step"), rows)

    return make


def _three(values: list[float], task: str) -> str:
    numbers = statistics.mean(values), min(values), max(values)
    mean, low, high = (f"{100 * n:.1f}%" if task == "cifar" else f"{n:.3f}" for n in numbers)
    return f"{mean} [{low}, {high}]"


def best_figures(results: Results, task: str, names: Iterable[str]) -> str:
    """Write the best test figures of some optimizers, each with the schedule that suits it."""
    best = finals(results, task)
    choose = max if task == "cifar" else min
    return ", ".join(
        f"{OPTIMIZERS.get(name, 'SGD')} {_three(values, task).split(' ')[0]}"
        for name in names
        for values in [choose(best[name][2].values(), key=statistics.mean)]
    )


CHOICES_CASES = {"resnet50-64": "ResNet-50, batch 64", "resnet110-128": "ResNet-110 (CIFAR), batch 128",
                 "gpt2-2x1024": "GPT-2, 2 x 1024 tokens"}  # fmt: skip
FOUR_RUNS = "eva-cost-resnet110-four-runs-h200.csv"


def eva_cost_table(results: Results) -> str:
    """Write times a step of SGD, and of AdamW, by model and form."""
    rows = []
    for form in ("captured", "eager"):
        for case, name in CHOICES_CASES.items():
            found = results.rows("eva-cost-h200.csv", case=case)
            own = {row["mode"].removeprefix(f"{form} "): row for row in found if row["mode"].startswith(form)}
            rows.append(_cost_row(name if form == "captured" else f"{name}, eager", own))
    for run in ("1", "2", "3", "4"):
        own = {row["mode"].removeprefix("captured "): row for row in results.rows(FOUR_RUNS, run=run)}
        rows.append(_cost_row(f"ResNet-110, process {run}", own))
    header = ("", "SGD, ms", "SGD again", "fused AdamW", "`Eva`", "`EvaF`", "`Eva`, `EvaF` over AdamW")
    return table((*header, "state over SGD's"), rows)


def _cost_row(name: str, own: Mapping[str, Row]) -> list[str]:
    ratios = (interval(own[mode], *TIMES_SGD) for mode in ("sgd (again)", "adamw", "eva", "eva-f"))
    over = ", ".join(f"{float(own[mode]['times_adamw']):.3f}" for mode in ("eva", "eva-f"))
    state = ", ".join(f"{float(own[mode]['state_times_sgd']):.3f}" for mode in ("eva", "eva-f"))
    return [name, f"{float(own['sgd']['ms_50']):.2f}", *ratios, over, state]


TIMES_SGD = ("times_sgd", "times_sgd_low", "times_sgd_high")


def cost_span(results: Results, column: str) -> str:
    """Say what a captured step of ``Eva`` or ``EvaF`` takes, over all models and processes."""
    rows = [*results.rows("eva-cost-h200.csv"), *results.rows(FOUR_RUNS)]
    return span(float(row[column]) for row in rows if row["mode"] in ("captured eva", "captured eva-f"))


CHOICES = {
    "eva-f": "`EvaF`, lr 0.04 (default)",
    "eva-f lr 0.02": "lr 0.02",
    "eva-f lr 0.06": "lr 0.06",
    "eva-f lr 0.1": "lr 0.1",
    "eva-f momentum behind, lr 0.02": "momentum behind the direction, lr 0.02",
    "eva-f momentum behind, lr 0.03": "the same, lr 0.03",
    "eva-f momentum 0.95": "momentum 0.95, not 0.9",
    "eva-f by layer": "one length for the layer, not for rows",
    "eva-f average 0.95": "running average 0.95, not 0.3",
    "eva-f average 0.1": "running average 0.1",
    "eva-f 16 samples": "input vectors of 16 samples",
    "eva-f damping 0.1": "damping 0.1, not 0.01",
    "eva-f damping 0.001": "damping 0.001",
    "no vectors, lr 0.02": "no vectors (damping 1e6), lr 0.02: what lengths of rows do alone",
    "no vectors, lr 0.04": "the same, lr 0.04",
    "eva": "`Eva`, lr 0.04 (default)",
    "eva lr 0.02": "lr 0.02",
    "eva lr 0.06": "lr 0.06",
    "eva by layer": "one length for the layer",
    "eva average 0.95": "running average 0.95",
    "eva output damping 0.3": "output damping 0.3, not 0.1",
    "eva output damping 1": "output damping 1",
    "eva-s": "`EvaS`, lr 0.01 (default: running average 0.1, damping 0.3)",
    "eva-s by row": "one length for each row",
    "eva-s average 0.95": "running average 0.95",
    "eva-s damping 0.03": "damping 0.03",
    "eva-f reference lr 0.3": "`EvaF(reference=True)`, lr 0.3",
    "eva reference lr 0.1": "`Eva(reference=True)`, lr 0.1",
    "eva-s reference lr 0.6": "`EvaS(reference=True)`, lr 0.6",
    "adamw lr 0.002": "AdamW, lr 0.002",
    "sgd lr 0.6": "SGD with momentum, lr 0.6",
}


def choices_table(results: Results) -> str:
    """Write the test error of each choice of the defaults, by seed."""
    errors = {(row["choice"], row["seed"]): row["test_error"] for row in results.rows("eva-choices-cpu.csv")}
    rows = [
        [name, *(errors[choice, seed].replace("nan", "diverged") for seed in "01")] for choice, name in CHOICES.items()
    ]
    return table(("", "seed 0", "seed 1"), rows)


PHASE_CASES = {
    "resnet50-64": "ResNet-50, 54 layers", "resnet110-128": "ResNet-110, 110 layers", "gpt2-2x1024": "GPT-2, 48 layers",
}  # fmt: skip


def phases_table(results: Results) -> str:
    """Write milliseconds of the host by phase of an eager step: of SGD, of SGD again, of ``Eva``."""
    rows = []
    for case, name in PHASE_CASES.items():
        own = {row["mode"]: row for row in results.rows("eva-eager-phases-h200.csv", case=case)}
        modes = [own[mode] for mode in ("sgd", "sgd (again)", "eva")]
        phases = ("forward_ms", "backward_ms", "step_ms")
        rows.append([name, *(", ".join(f"{float(row[phase]):.1f}" for row in modes) for phase in phases)])
    return table(("", "forward", "backward", "step"), rows)


DIRECTIONS = {
    "eva-f": "none: `EvaF`",
    "1 left, at least 0.3": "one: `Eva`",
    "3 left, at least 0.3": "three",
    "6 left": "six",
    "orthogonal": "all, behind the mean input's",
    "orthogonal, no vectors": "all, the mean input left in",
}
DIRECTED = {"cifar": ("1000", "0.15"), "text": ("800", "0.03"), "autoencoder": ("300", "0.05")}


def directions_table(results: Results) -> str:
    """Write the test figures of rules that take off so many directions, by task: two seeds each."""
    rows = []
    for rule, name in DIRECTIONS.items():
        cells = []
        for task, (steps, lr) in DIRECTED.items():
            found = results.rows("eva-directions-h200.csv", task=task, rule=rule, steps=steps, lr=lr)
            figures = [float(row["test"]) for row in sorted(found, key=lambda row: row["seed"])]
            cells.append(", ".join(f"{100 * one:.1f}%" if task == "cifar" else f"{one:.3f}" for one in figures))
        rows.append([name, *cells])
    header = ("", "CIFAR-10, 1000 steps, lr 0.15", "GPT, 800 steps, lr 0.03", "autoencoder, 300 steps, lr 0.05")
    return table(header, rows)
