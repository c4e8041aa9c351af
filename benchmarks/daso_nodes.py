"""DASO against what torch and others offer, on two nodes of one machine with a shaped link between them.

    sudo python benchmarks/daso_nodes.py race --data mnist.npz --results benchmarks/results/daso-race.csv
    sudo python benchmarks/daso_nodes.py exposed --data mnist.npz --results benchmarks/results/daso-exposed.csv
    python benchmarks/daso_nodes.py scale --results benchmarks/results/daso-scale.csv
    python benchmarks/daso_nodes.py draw --results benchmarks/results/daso-race.csv

``race``: seconds of training until MNIST is known to a given accuracy, and accuracy after equal epochs, with
the learning rate of each way tuned on the same grid beforehand. ``exposed``: what exchanges cost a step, and
bytes on the link. Both resume: what the results hold is left out. ``scale``: what the simulator says of larger
clusters, with the step of one device as it was measured, or estimated where it was not.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from daso_variants import WAYS
from namespaces import Link
from tables import append, read

from gradweave import schedule
from gradweave.compare.run import environment
from gradweave.schedule import network

TARGET = 0.975
LRS = (0.2, 0.3, 0.4)
TUNING_SEEDS, SEEDS = (100, 101), range(5)
EPOCHS, BATCH, WIDTH = 6, 256, 512
MEGABITS = 700.0
HERE = Path(__file__).parent
STEPS = HERE / "results" / "eva-cost-h200.csv"
MEASURED = {"resnet50": ("resnet50-64", "captured sgd")}
"""Case and mode, among steps that were measured on one device."""


class Ranks:
    """Processes on both nodes, which do jobs together."""

    def __init__(self, link: Link, places: int, data: Path) -> None:
        size = 2 * places
        self._processes: list[subprocess.Popen[str]] = [
            link.start(
                rank // places, [str(HERE / "daso_worker.py"), str(data.resolve())],
                RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(places),
                PYTHONPATH=f"{HERE.parent / 'src'}:{HERE}",
            )
            for rank in range(size)
        ]  # fmt: skip

    def do(self, **job: Any) -> list[dict[str, Any]]:
        for process in self._processes:
            process.stdin.write(json.dumps(job) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        return [json.loads(process.stdout.readline()) for process in self._processes]  # type: ignore[union-attr]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def race(data: Path, results: Path, megabits: float, minutes: float) -> None:
    """One row for each way, learning rate and seed."""
    ends = time.monotonic() + 60 * minutes
    done = {(row["way"], row["lr"], row["seed"]) for row in read(results)}
    with Link(megabits) as link, Ranks(link, 2, data) as ranks:

        def run(way: str, lr: float, seed: int, kind: str) -> None:
            if (way, str(lr), str(seed)) in done:
                return
            if time.monotonic() > ends:
                raise SystemExit("time is up; run again for the rest")
            before = link.sent_bytes(0)
            job = {"way": way, "lr": lr, "seed": seed, "epochs": EPOCHS, "batch": BATCH, "width": WIDTH}
            first, *_ = ranks.do(job="race", target=TARGET, **job)
            sent = link.sent_bytes(0) - before
            row = {
                "kind": kind, "way": way, "lr": lr, "seed": seed, "epochs": EPOCHS, "target": TARGET,
                "seconds_to_target": round(first["seconds_to_target"], 3),
                "final_accuracy": round(first["final_accuracy"], 4),
                "seconds": round(first["seconds"], 3), "step_milliseconds": round(1e3 * first["step_seconds"], 2),
                "steps": first["steps"], "bytes_sent_by_node_0": sent, "megabits": megabits,
                "rhythm": " ".join(f"{n}:{e}/{w}" for n, e, w in first.get("rhythm", [])[-3:]),
                **environment(torch.device("cpu")),
            }  # fmt: skip
            print({key: row[key] for key in ("way", "lr", "seed", "seconds_to_target", "final_accuracy", "seconds")})
            append(results, [row])

        for seed in TUNING_SEEDS:
            for lr in LRS:
                for way in WAYS:
                    run(way, lr, seed, "tuning")
        best = tuned(results)
        for seed in SEEDS:
            for way in WAYS:
                run(way, best[way], seed, "race")


def tuned(results: Path) -> dict[str, float]:
    """The learning rate with which each way was soonest at the target in all tuning runs, or else nearest to it."""
    scores: dict[tuple[str, float], list[float]] = {}
    for row in read(results):
        if row["kind"] == "tuning":
            reached = float(row["seconds_to_target"])
            score = 1e3 * (2 - float(row["final_accuracy"])) if math.isnan(reached) else reached
            scores.setdefault((row["way"], float(row["lr"])), []).append(score)
    return {
        way: min((max(values), lr) for (name, lr), values in scores.items() if name == way)[1]
        for way in dict.fromkeys(name for name, _ in scores)
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "2 x 2, compute emulated by waiting": {"places": 2, "seconds": 0.1, "megabits": 50, "every": None},
    "one rank per node, real compute": {"places": 1, "seconds": None, "megabits": 250, "batch": 1024, "every": None},
    "the same, every=8": {"places": 1, "seconds": None, "megabits": 250, "batch": 1024, "every": 8},
    "2 x 2, real compute, contended": {"places": 2, "seconds": None, "megabits": 250, "every": None},
}
ELEMENTS = 500_000
"""Of the model that waits: few, so that what it does besides waiting is little."""
ROUNDS, SETTLING_STEPS = 4, 30


def exposed(data: Path, results: Path) -> None:
    """With and without exchanges in turns; the first round of each is for warming up."""
    done = {row["setting"] for row in read(results)}
    for name, setting in SETTINGS.items():
        if name in done:
            continue
        with Link(setting["megabits"]) as link, Ranks(link, setting["places"], data) as ranks:
            common = {
                "job": "expose", "steps": 80, "seconds": setting["seconds"], "elements": ELEMENTS,
                "batch": setting.get("batch", BATCH), "width": WIDTH, "every": setting["every"], "wait": None,
            }  # fmt: skip
            times: dict[str, list[float]] = {"without": [], "without (again)": [], "with": []}
            shares, planned, sent, ideal = [], [], 0, 0
            stats: dict[str, Any] = {}
            picture = str(results.with_name(f"daso-timeline-{len(done)}.png").resolve())
            for number in range(ROUNDS + 1):
                for variant in times:
                    found = ranks.do(**common, exchanges=variant == "with", picture=picture)
                    if not number:
                        continue
                    times[variant].append(statistics.fmean(found[0]["durations"][SETTLING_STEPS:]))
                    if variant == "with":
                        stats = found[0]["stats"]
                        sent += found[0]["sent"]
                        size = 2 * (ELEMENTS if setting["seconds"] else parameters(WIDTH))
                        ideal += size * sum(int(rank["stats"]["exchanges"]) for rank in found[: setting["places"]])
                        planned.append(found[0]["planned_step"])
                        shares.append(times["with"][-1] / times["without"][-1] - 1)
            done.add(name)
        plain = statistics.median(times["without"] + times["without (again)"])
        row = {
            "setting": name, "megabits": setting["megabits"], "step_milliseconds_without": round(1e3 * plain, 2),
            "step_milliseconds_with": round(1e3 * statistics.median(times["with"]), 2),
            "exposed": round(statistics.median(times["with"]) / plain - 1, 4),
            "a_a": round(statistics.median(times["without (again)"]) / statistics.median(times["without"]) - 1, 4),
            "lowest": round(min(shares), 4), "highest": round(max(shares), 4),
            "transfer_milliseconds": round(1e3 * stats["transfer_seconds"], 2),
            "every": stats["every"], "wait": stats["wait"],
            "bytes_on_link": sent, "bytes_ideal": ideal, "bytes_over": round(sent / ideal - 1, 4),
            "predicted_milliseconds": round(1e3 * statistics.median(planned), 2),
            **environment(torch.device("cpu")),
        }  # fmt: skip
        print(row)
        append(results, [row])


def parameters(width: int) -> int:
    return 784 * width + width + width * width + width + 10 * width + 10


def measured_seconds(case: str, mode: str) -> float:
    """The median of a step on one device."""
    (row,) = (row for row in read(STEPS) if (row["case"], row["mode"]) == (case, mode))
    return float(row["ms_50"]) / 1e3


def as_long_as(costs: schedule.Costs, seconds: float) -> schedule.Costs:
    """Estimated costs, all longer by the same factor, so that a step takes so long."""
    factor = seconds / costs.compute_seconds
    times = ("forward", "input_grad", "weight_grad", "update")
    layers = (replace(layer, **{name: factor * getattr(layer, name) for name in times}) for layer in costs.layers)
    return replace(costs, layers=tuple(layers), source="measured")


def scale(results: Path) -> None:
    """What the simulator says of more nodes and of faster links, beside flat data parallel."""
    rows: list[dict[str, object]] = []
    for name, batch in (("resnet50", 64), ("gpt2_xl", 4)):
        costs, source = network(name, batch=batch), "estimated"
        if name in MEASURED:
            costs, source = as_long_as(costs, measured_seconds(*MEASURED[name])), "measured"
        for rate in ("10Gbit/s", "100Gbit/s", "400Gbit/s"):
            for nodes in (4, 64, 256, 1024):
                link = schedule.Link.parse(f"{rate},10us")
                compute, transfer = costs.compute_seconds, link.all_reduce_seconds(costs.parameter_bytes // 2, nodes)
                wait = max(1, math.ceil(transfer / compute))
                graph = schedule.hierarchical(
                    costs, nodes=nodes, local_ranks=8, link=link, local_link=schedule.Link.parse("300GB/s,2us"),
                    steps=max(8, 4 * wait),
                )  # fmt: skip
                options = {"every": wait, "wait": wait, "payload": "bfloat16"}
                ddp = schedule.plan(graph, policy="ddp").simulate().step_time
                woven = schedule.plan(graph, policy="daso", **options).simulate().step_time
                rows.append({
                    "network": name, "batch": batch, "link": rate, "nodes": nodes, "devices": 8 * nodes,
                    "compute": source, "compute_milliseconds": round(1e3 * compute, 3), "every_and_wait": wait,
                    "ddp_milliseconds": round(1e3 * ddp, 3), "daso_milliseconds": round(1e3 * woven, 3),
                    "times_as_fast": round(ddp / woven, 2), "compute_share_ddp": round(compute / ddp, 3),
                    "compute_share_daso": round(compute / woven, 3),
                })  # fmt: skip
                print(rows[-1])
    results.unlink(missing_ok=True)
    append(results, rows)


def raced(results: Path) -> dict[str, list[dict[str, str]]]:
    """The rows of each way with the learning rate that was tuned for it."""
    best, rows = tuned(results), read(results)
    return {
        way: [row for row in rows if row["kind"] == "race" and row["way"] == way and float(row["lr"]) == best[way]]
        for way in WAYS
    }


def draw(results: Path) -> None:
    """Accuracy and time of each way, as a table on the terminal and as a picture beside the results."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4))
    print("| way | lr | seconds to target, median (range) | final accuracy, mean | milliseconds per step |")
    print("|---|---|---|---|---|")
    for number, (way, rows) in enumerate(raced(results).items()):
        times = sorted(float(row["seconds_to_target"]) for row in rows if row["seconds_to_target"] != "nan")
        shown = f"{statistics.median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})" if times else "never"
        shown += "" if len(times) == len(rows) else f", reached by {len(times)} of {len(rows)}"
        accuracy = statistics.fmean(float(row["final_accuracy"]) for row in rows)
        step = statistics.median(1e3 * float(row["seconds"]) / float(row["steps"]) for row in rows)
        print(f"| `{way}` | {rows[0]['lr']} | {shown} | {100 * accuracy:.2f}% | {step:.1f} |")
        if len(times) == len(rows):
            axis.barh(number, statistics.median(times), color="tab:green" if way == "daso" else "tab:gray", alpha=0.6)
        axis.plot(times, [number] * len(times), "k.", markersize=4)
    axis.set_yticks(range(len(WAYS)), list(WAYS))
    axis.invert_yaxis()
    axis.set_xlabel(f"seconds of training until {100 * TARGET:.1f}% of MNIST's test images are known (dots: seeds)")
    figure.tight_layout()
    figure.savefig(results.with_suffix(".png"), dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("race", "exposed", "scale", "draw"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--megabits", type=float, default=MEGABITS)
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = parser.parse_args()
    if arguments.what == "race":
        race(arguments.data, arguments.results, arguments.megabits, arguments.minutes)
    elif arguments.what == "exposed":
        exposed(arguments.data, arguments.results)
    elif arguments.what == "scale":
        scale(arguments.results)
    else:
        draw(arguments.results)


if __name__ == "__main__":
    main()
