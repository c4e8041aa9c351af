"""``DataParallel`` against DistributedDataParallel on two nodes of one machine with a shaped link. Needs root.

    sudo python benchmarks/data_parallel_link.py time --results benchmarks/results/data-parallel.csv
    python benchmarks/data_parallel_link.py draw --results benchmarks/results/data-parallel.csv

For each model and each ratio r of communication to computation, the link is given the rate at which a step's
gradients take r times as long as its computation; then all variants take turns. ``waiting`` models emulate
computation by waiting. Costs are measured, and predictions made from them, in every round; the table has the median.
Settings that the results already hold are left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import torch
from namespaces import Link
from tables import append, read

from gradweave.compare.run import environment
from gradweave.compare.statistics import paired_ratio, percentiles

HERE = Path(__file__).parent
RATIOS = (0.3, 0.6, 0.75, 0.9, 1.0, 1.5)
SHRUNK = {"waiting resnet50": 8, "waiting uniform": 8, "resnet18": 1, "gpt": 1}
"""The emulated layers are an eighth of the real ones; so are their messages, of all variants."""
OURS, DEFAULT = 4 << 20, 25 << 20
"""Bytes of a message: ours, and DistributedDataParallel's default."""
SETTINGS = {
    "waiting resnet50, 2 ranks": ("waiting resnet50", 1, 0.4),
    "waiting resnet50, 4 ranks": ("waiting resnet50", 2, 0.4),
    "waiting uniform, 2 ranks": ("waiting uniform", 1, 0.4),
    "resnet18, 2 ranks, real compute": ("resnet18", 1, 0.0),
    "gpt, 2 ranks, real compute": ("gpt", 1, 0.0),
}
ROUNDS = 3
COLOURS = {"no_barrier": "#66aa55", "reverse_first_k": "#228833", "auto": "#4477aa", "ddp (again)": "#999999"}


class Ranks:
    """Processes on both nodes, which do jobs together; each has a core of its own if they are pinned."""

    def __init__(self, link: Link, places: int, *, pinned: bool) -> None:
        size = 2 * places
        self._processes: list[subprocess.Popen[str]] = [
            link.start(
                rank // places, [str(HERE / "data_parallel_worker.py")], RANK=str(rank), WORLD_SIZE=str(size),
                PYTHONPATH=f"{HERE.parent / 'src'}:{HERE}", PINNED="yes" if pinned else "",
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


def slowest(answers: list[dict[str, Any]]) -> float:
    return max(answer["seconds"] for answer in answers)


def measure(name: str, ratio: float, rounds: int, steps: int) -> list[dict[str, object]]:
    """All variants of one setting, in turns."""
    model, places, seconds = SETTINGS[name]
    common = {"model": model, "seconds": seconds}
    bucket_bytes, default_bytes = OURS // SHRUNK[model], DEFAULT // SHRUNK[model]
    with Link(10_000.0) as link, Ranks(link, places, pinned=seconds == 0) as ranks:
        free = ranks.do(job="predict", megabits=1e6, bucket_bytes=bucket_bytes, default_bytes=default_bytes, **common)
        compute, size = max(one["compute"] for one in free), free[0]["bytes"]
        ways = 2 * places
        megabits = 2 * (ways - 1) / ways * size * 8 / 1e6 / (ratio * compute)
        link.shape(megabits)
        ask = {"job": "predict", "megabits": megabits, "bucket_bytes": bucket_bytes, "default_bytes": default_bytes}
        predicted = ranks.do(**ask, **common)[0]
        k = predicted["k"]
        variants = {
            "ddp": ("ddp", {"bucket_cap_mb": default_bytes / 2**20}),
            "ddp_small": ("ddp", {"bucket_cap_mb": bucket_bytes / 2**20}),
            "no_barrier": ("ours", {"policy": "no_barrier", "bucket_bytes": bucket_bytes}),
            "reverse_first_k": ("ours", {"policy": "reverse_first_k", "k": k, "bucket_bytes": bucket_bytes}),
            "auto": ("ours", {"policy": "auto", "bucket_bytes": bucket_bytes}),
        }
        for variant, (way, options) in variants.items():
            ranks.do(job="make", name=variant, way=way, options=options, **common)
            ranks.do(job="steps", name=variant, count=40 if variant == "auto" else 2)
        order = [*variants, "ddp (again)"]
        times: dict[str, list[float]] = {variant: [] for variant in order}
        last: dict[str, list[dict[str, Any]]] = {}
        forecasts: list[dict[str, Any]] = []
        for number in range(rounds):
            forecasts.append(ranks.do(**ask, **common)[0])
            for variant in order[number % len(order) :] + order[: number % len(order)]:
                last[variant] = ranks.do(job="steps", name=variant.removesuffix(" (again)"), count=steps)
                times[variant].append(slowest(last[variant]))
    predicted = {key: median(forecast[key] for forecast in forecasts) for key in predicted}
    compute = predicted["compute"]
    rows: list[dict[str, object]] = []
    for variant in order:
        low, middle, high = percentiles([1e3 * value for value in times[variant]])
        against = paired_ratio(times["ddp"], times[variant])
        small = paired_ratio(times["ddp_small"], times[variant])
        foreseen = predicted.get(variant.removesuffix(" (again)"))
        if variant == "auto":
            chosen = last[variant][0]["explained"]
            foreseen = predicted["reverse_first_k"] if "no barrier" in chosen else predicted["ddp_small"]
        rows.append(
            {
                "setting": name, "r": ratio, "variant": variant, "ms_20": f"{low:.2f}", "ms_50": f"{middle:.2f}",
                "ms_80": f"{high:.2f}", "speedup": f"{against.value:.4f}", "speedup_low": f"{against.low:.4f}",
                "speedup_high": f"{against.high:.4f}", "over_ddp_small": f"{small.value:.4f}",
                "predicted_ms": f"{1e3 * foreseen:.2f}", "predicted_speedup": f"{predicted['ddp'] / foreseen:.4f}",
                "k": last[variant][0].get("k", ""), "compute_ms": f"{1e3 * compute:.2f}", "megabits": f"{megabits:.2f}",
                "measured_megabits": f"{predicted['measured_megabits']:.2f}", "bytes": size, "ranks": ways,
                "latency_us": f"{1e6 * predicted['latency']:.0f}",
                "device_ns_per_byte": f"{predicted['device_ns_per_byte']:.3f}",
                "bucket_bytes": bucket_bytes, "rounds": rounds, "steps": steps,
                "chosen": last[variant][0].get("explained", ""),
                **environment(torch.device("cpu")),
            }
        )  # fmt: skip
        print(f"   {variant:16s} {middle:8.1f} ms  {against}  predicted {1e3 * foreseen:.1f} ms", flush=True)
    return rows


def draw(results: Path) -> None:
    """Measured and simulated speed-up over r, a panel for each setting."""
    from matplotlib.figure import Figure

    rows = read(results)
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    across = 3
    down = -(-len(settings) // across)
    figure = Figure(figsize=(4.5 * across, 3.6 * down), layout="constrained")
    panels = figure.subplots(down, across, sharey=True, squeeze=False).flatten()
    for unused in panels[len(settings) :]:
        unused.axis("off")
    for axes, setting in zip(panels, settings, strict=False):
        for variant, colour in COLOURS.items():
            own = sorted((float(r["r"]), r) for r in rows if r["setting"] == setting and r["variant"] == variant)
            x = [ratio for ratio, _ in own]
            axes.plot(x, [float(r["speedup"]) for _, r in own], "o-", color=colour, label=variant)
            if variant in ("no_barrier", "reverse_first_k"):
                predicted = [float(r["predicted_speedup"]) for _, r in own]
                axes.plot(x, predicted, ":", color=colour, label=f"{variant}, simulated")
        axes.axhline(1.0, color="black", linewidth=0.8)
        emulated = setting.startswith("waiting")
        axes.set_title(f"{setting}\ncomputation emulated by waiting" if emulated else setting, fontsize=9)
        axes.set_xlabel("communication / computation")
        axes.set_ylabel("speed-up over DDP")
    panels[-1].legend(*panels[0].get_legend_handles_labels(), loc="center", frameon=False)
    figure.savefig(results.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "draw"))
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--setting", action="append", choices=tuple(SETTINGS))
    parser.add_argument("--ratio", action="append", type=float)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=5, help="of each variant in a round")
    arguments = parser.parse_args()
    if arguments.what == "draw":
        draw(arguments.results)
        return
    done = {(row["setting"], float(row["r"])) for row in read(arguments.results)}
    for name in arguments.setting or SETTINGS:
        for ratio in arguments.ratio or RATIOS:
            if (name, ratio) not in done:
                print(f"{name}, r = {ratio}", flush=True)
                append(arguments.results, measure(name, ratio, arguments.rounds, arguments.steps))


if __name__ == "__main__":
    main()
