"""Pipeline schedules against each other: predicted and measured.

    python benchmarks/pipeline_stages.py emulated --results benchmarks/results/pipeline-emulated.csv
    python benchmarks/pipeline_stages.py real --results benchmarks/results/pipeline-real.csv
    python benchmarks/pipeline_stages.py simulate --costs benchmarks/results/costs-gpt-4x2048-h200.json

``emulated``: ranks whose compute is emulated by waiting, more of them than there are cores. ``real``: two ranks
with one core each, on a BERT-like and a GPT-like stack. Both run the variants of a setting in turns, GPipe
twice, and resume: settings that the results hold are left out. ``simulate``: nothing runs; layers were measured,
one device at a time, and blocks are tiled to deeper models.

Plans and predictions count the link as measured between two ranks; ``free_link`` columns have one that costs nothing.
``best_stock`` is the fastest of torch's schedules in a setting, and ``over_best_stock`` how many times as fast as that
a variant is, by rounds. ``COMMIT`` in the environment is what the results name as measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from pipeline_simulated import simulate
from tables import append, read

from gradweave.compare.run import environment
from gradweave.compare.statistics import paired_ratio

HERE = Path(__file__).parent
GPIPE, AGAIN, RIVAL = "gpipe", "gpipe (again)", "interleaved_zero_bubble"
STOCK = (GPIPE, "one_f_one_b", RIVAL, "zbv")
"""Torch's schedules."""
ROUNDS = {"emulated": 5, "real": 7}
EMULATED = [{"ranks": ranks, "layers": 24, "microbatches": microbatches} for ranks in (4, 8) for microbatches in (4, 8)]
REAL = [
    {"ranks": 2, "model": model, "blocks": 10, "width": width, "tokens": 128, "microbatches": 4, "batch": batch}
    for width, batch in ((256, 16), (768, 8))
    for model in ("bert", "gpt")
]
"""Small blocks, of which messages take a good part, and blocks of BERT-base's and GPT-2's size."""


class Ranks:
    """Processes that do jobs together."""

    def __init__(self, count: int, *, pinned: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = f"file://{self._folder.name}/store"
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "pipeline_worker.py"), str(rank), str(count), store,
                 "pinned" if pinned else "free"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(count)
        ]  # fmt: skip

    def tell(self, **job: Any) -> None:
        for process in self._processes:
            process.stdin.write(json.dumps(job) + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]

    def do(self, **job: Any) -> list[dict[str, Any]]:
        self.tell(**job)
        lines = [process.stdout.readline() for process in self._processes]  # type: ignore[union-attr]
        if not all(lines):
            raise SystemExit("a rank has failed; see what it printed")
        return [json.loads(line) for line in lines]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


def variants(ranks: Ranks, count: int, microbatches: int, *, group: int | None) -> dict[str, dict[str, Any]]:
    """Makes the pipelines; ours once more within what the rival is predicted to hold."""
    options: dict[str, dict[str, Any]] = {
        GPIPE: {"policy": "gpipe"},
        AGAIN: {"policy": "gpipe"},
        "one_f_one_b": {"policy": "one_f_one_b"},
        "fast_forward": {"policy": "fast_forward"},
        "modulo": {"policy": "modulo", "group": group},
        RIVAL: {"policy": RIVAL, "group": group},
        "zbv": {"policy": "zbv"},
    }
    if microbatches < count:
        del options["one_f_one_b"]
    made = {
        name: ranks.do(do="make", variant=name, microbatches=microbatches, options=chosen)[0]
        for name, chosen in options.items()
    }
    equal = {**options["modulo"], "byte_budget": made[RIVAL]["peak"]}
    name = "modulo, memory of interleaved_zero_bubble"
    made[name] = ranks.do(do="make", variant=name, microbatches=microbatches, options=equal)[0]
    return made


def run(setting: dict[str, Any], kind: str, results: Path, rounds: int) -> None:
    """All variants of one setting, in turns; the first round is for warming up."""
    label = "compute emulated by waiting" if kind == "emulated" else "real compute, one core per rank"
    group = 1 if kind == "emulated" else None
    with Ranks(setting["ranks"], pinned=kind == "real") as ranks:
        ranks.tell(kind=kind, **setting)
        made = variants(ranks, setting["ranks"], setting["microbatches"], group=group)
        times: dict[str, list[float]] = {name: [] for name in made}
        for number in range(rounds + 1):
            for name in made:
                found = ranks.do(do="step", variant=name)
                if number:
                    times[name].append(max(answer["seconds"] for answer in found))
    base = times[GPIPE]
    best = fastest({name: times[name] for name in STOCK if name in times})
    rows = []
    for name, seconds in times.items():
        over = paired_ratio(times[best], seconds)
        low, middle, high = (statistics.quantiles(seconds, n=10)[i] for i in (1, 4, 7))
        ratios = [one / own for one, own in zip(base, seconds, strict=True)]
        predicted = made[GPIPE]["predicted"] / made[name]["predicted"]
        ideal = made[GPIPE]["simulated"] / made[name]["simulated"]
        measured = statistics.median(base) / statistics.median(seconds)
        rows.append({
            "setting": key(setting), "compute": label, "variant": name,
            "ms_20": round(1e3 * low, 1), "ms_50": round(1e3 * middle, 1), "ms_80": round(1e3 * high, 1),
            "times_as_fast": round(measured, 4), "lowest": round(min(ratios), 4), "highest": round(max(ratios), 4),
            "best_stock": best, "over_best_stock": round(over.value, 4), "over_best_stock_low": round(over.low, 4),
            "over_best_stock_high": round(over.high, 4),
            "predicted_ms": round(1e3 * made[name]["predicted"], 1), "predicted_times_as_fast": round(predicted, 4),
            "free_link_times_as_fast": round(ideal, 4),
            "share_of_free_link_excess": round((measured - 1) / (ideal - 1), 3) if ideal > 1.001 else "",
            "predicted_peak_bytes": made[name]["peak"], "layers_per_stage": made[name]["group"], "rounds": rounds,
            **environment(torch.device("cpu")), "commit": os.environ.get("COMMIT", ""),
        })  # fmt: skip
        print({field: rows[-1][field] for field in ("setting", "variant", "ms_50", "times_as_fast",
                                                    "over_best_stock", "predicted_times_as_fast")})  # fmt: skip
    append(results, rows)


def fastest(times: dict[str, list[float]]) -> str:
    """Name the variant with the least median."""
    return min(times, key=lambda name: statistics.median(times[name]))


def key(setting: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["emulated", "real", "simulate"])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--costs", type=Path, default=HERE / "results" / "costs-gpt-4x2048-h200.json")
    parser.add_argument("--rounds", type=int, help="5 of emulated settings and 7 of real ones, unless given")
    parser.add_argument("--milliseconds", type=float, default=30.0, help="of F, X and W of an emulated layer")
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args()
    if given.what == "simulate":
        simulate(given.costs, given.results or HERE / "results" / "pipeline-simulated.csv")
        return
    results = given.results or HERE / "results" / f"pipeline-{given.what}.csv"
    ends = time.monotonic() + 60 * given.minutes
    done = {row["setting"] for row in read(results)}
    for setting in EMULATED if given.what == "emulated" else REAL:
        if given.what == "emulated":
            setting = {**setting, "seconds": given.milliseconds / 1e3, "batch": setting["microbatches"]}
        if key(setting) in done:
            continue
        if time.monotonic() > ends:
            raise SystemExit("time is up; run again for the rest")
        run(setting, given.what, results, given.rounds or ROUNDS[given.what])


if __name__ == "__main__":
    main()
