"""``DataParallel`` against the best DistributedDataParallel over the links of ``data_parallel_link.py``. Needs root.

    sudo COMMIT=... python benchmarks/data_parallel_stock.py --results FILE

For each setting and ratio r of communication to computation, sizes of DDP's buckets are ranked first, in short turns:
the size of our messages, DDP's default and others between; the least is halved, and the greatest doubled, while it is
the fastest. Then DDP takes turns with ours: DDP with its default, with our messages, with the size that was fastest
(twice), and with that and torch's bf16 hook, beside which ours sends bfloat16 too. ``best_stock`` is the fastest of
those that average in float32, ``over_best_stock`` how many times as fast as that a variant is, and ``a_a`` what tuned
DDP is to itself: a ratio counts as a claim where its interval lies beyond that one's. Points that the results hold are
left out; a point of two ranks takes some five minutes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from data_parallel_link import DEFAULT, OURS, SETTINGS, SHRUNK, Ranks, slowest
from namespaces import Link
from tables import append, read

from gradweave.compare.run import environment
from gradweave.compare.statistics import is_claim, paired_ratio, percentiles

RATIOS = (0.3, 0.6, 0.9, 1.5)
CANDIDATES = (1 << 20, 2 << 20, OURS, 8 << 20, DEFAULT)
LEAST, GREATEST = 1 << 18, 100 << 20
ROUNDS, STEPS = 5, 5
RANKING_ROUNDS, RANKING_STEPS = 2, 3
EXACT = ("ddp", "ddp_small", "ddp_tuned")
TUNED, AGAIN, BF16, OURS_BF16 = "ddp_tuned", "ddp_tuned (again)", "ddp_tuned, bf16 hook", "auto, bf16"

Times = dict[str, list[float]]


def fastest(times: Times) -> str:
    """Name the variant with the least median."""
    return min(times, key=lambda name: median(times[name]))


def fastest_size(measure: Callable[[list[int]], dict[int, float]]) -> int:
    """Find the size of messages that takes least time, with a smaller one and a greater one tried on either side of it.

    Args:
        measure: What steps with messages of some sizes take.
    """
    times = measure(list(CANDIDATES))
    while True:
        best = min(times, key=times.__getitem__)
        if best == min(times) and best > LEAST:
            times |= measure([best // 2])
        elif best == max(times) and best < GREATEST:
            times |= measure([best * 2])
        else:
            return best


def turns(ranks: Ranks, names: list[str], rounds: int, steps: int) -> Times:
    """Have variants take turns, each round beginning with another one; a name ending in "(again)" is its twin's."""
    times: Times = {name: [] for name in names}
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(slowest(ranks.do(job="steps", name=name.removesuffix(" (again)"), count=steps)))
    return times


def tune(ranks: Ranks, common: dict[str, Any], shrunk: int) -> int:
    """Rank sizes of DDP's buckets."""

    def measure(sizes: list[int]) -> dict[int, float]:
        named = {f"{size} bytes": size for size in sizes}
        for name, size in named.items():
            ranks.do(job="make", name=name, way="ddp", options=bucket(size // shrunk), **common)
        times = turns(ranks, list(named), RANKING_ROUNDS, RANKING_STEPS)
        ranks.do(job="drop")
        return {size: median(times[name]) for name, size in named.items()}

    return fastest_size(measure)


def bucket(size: int) -> dict[str, Any]:
    """DDP's option for buckets of so many bytes; its default has a small first one besides."""
    return {} if size == DEFAULT else {"bucket_cap_mb": size / 2**20}


def measure(name: str, ratio: float, rounds: int, steps: int) -> list[dict[str, object]]:
    """All variants of one setting, in turns."""
    model, places, seconds = SETTINGS[name]
    common, shrunk = {"model": model, "seconds": seconds}, SHRUNK[model]
    ours = OURS // shrunk
    with Link(10_000.0) as link, Ranks(link, places, pinned=seconds == 0) as ranks:
        ask = {"job": "predict", "bucket_bytes": ours, "default_bytes": DEFAULT // shrunk, **common}
        free = ranks.do(megabits=1e6, **ask)
        count = 2 * places
        compute, size = max(one["compute"] for one in free), free[0]["bytes"]
        megabits = 2 * (count - 1) / count * size * 8 / 1e6 / (ratio * compute)
        link.shape(megabits)
        tuned = tune(ranks, common, shrunk)
        k = ranks.do(megabits=megabits, **ask)[0]["k"]
        variants: dict[str, tuple[str, int, dict[str, Any]]] = {
            "ddp": ("ddp", DEFAULT, bucket(DEFAULT // shrunk)),
            "ddp_small": ("ddp", OURS, bucket(ours)),
            TUNED: ("ddp", tuned, bucket(tuned // shrunk)),
            BF16: ("ddp_bf16", tuned, bucket(tuned // shrunk)),
            "reverse_first_k": ("ours", OURS, {"policy": "reverse_first_k", "k": k, "bucket_bytes": ours}),
            "auto": ("ours", OURS, {"policy": "auto", "bucket_bytes": ours}),
            OURS_BF16: ("ours_bf16", OURS, {"policy": "auto", "bucket_bytes": ours}),
        }
        for variant, (way, _, options) in variants.items():
            ranks.do(job="make", name=variant, way=way, options=options, **common)
            ranks.do(job="steps", name=variant, count=40 if variant.startswith("auto") else 2)
        times = turns(ranks, [*variants, AGAIN], rounds, steps)
        last = {variant: ranks.do(job="steps", name=variant, count=1)[0] for variant in variants}
    best = fastest({variant: times[variant] for variant in EXACT})
    same = paired_ratio(times[TUNED], times[AGAIN])
    rows: list[dict[str, object]] = []
    for variant, spent in times.items():
        low, middle, high = percentiles([1e3 * value for value in spent])
        over, twin = paired_ratio(times[best], spent), variant.removesuffix(" (again)")
        rows.append(
            {
                "setting": name, "r": ratio, "variant": variant,
                "results": "rounded to bfloat16" if variant in (BF16, OURS_BF16) else "DDP's",
                "message_bytes": variants[twin][1], "ms_20": f"{low:.2f}", "ms_50": f"{middle:.2f}",
                "ms_80": f"{high:.2f}", "best_stock": best, "best_stock_message_bytes": variants[best][1],
                "over_best_stock": f"{over.value:.4f}", "over_best_stock_low": f"{over.low:.4f}",
                "over_best_stock_high": f"{over.high:.4f}", "a_a": f"{same.value:.4f}", "a_a_low": f"{same.low:.4f}",
                "a_a_high": f"{same.high:.4f}", "claim": "yes" if is_claim(over, same) else "no",
                "k": last[twin].get("k", ""), "chosen": last[twin].get("explained", ""),
                "compute_ms": f"{1e3 * compute:.2f}", "megabits": f"{megabits:.2f}", "bytes": size, "ranks": count,
                "shrunk": shrunk, "rounds": rounds, "steps": steps, **environment(torch.device("cpu")),
                "commit": os.environ.get("COMMIT", ""),
            }
        )  # fmt: skip
        print(f"   {variant:22s} {middle:8.1f} ms  {over} of {best}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--setting", action="append", choices=tuple(SETTINGS))
    parser.add_argument("--ratio", action="append", type=float)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each variant in a round")
    arguments = parser.parse_args()
    done = {(row["setting"], float(row["r"])) for row in read(arguments.results)}
    for name in arguments.setting or SETTINGS:
        for ratio in arguments.ratio or RATIOS:
            if (name, ratio) not in done:
                print(f"{name}, r = {ratio}", flush=True)
                append(arguments.results, measure(name, ratio, arguments.rounds, arguments.steps))


if __name__ == "__main__":
    main()
