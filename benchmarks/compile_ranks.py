"""``compile(mesh=)`` against DistributedDataParallel, over the links of ``data_parallel_link.py``. Needs root.

    sudo COMMIT=... python benchmarks/compile_ranks.py --results FILE

Two ranks, one core each, with real computation. For each ratio r of communication to computation, sizes of DDP's
buckets are ranked first, for eager steps and for compiled ones. Then all take turns: eager DDP with a fused optimizer;
the same with model and loss under ``torch.compile``; both with torch's bf16 hook, which sends half of the bytes; our
step, replayed and compiled, which sends float32, with a barrier between steps and without one, and compiled with
bfloat16 messages. ``best_stock`` is the fastest of
stock steps that average in float32; the one that is fastest in a first round takes turns with itself (``a_a``).
Computation is what our compiled step takes on a free link.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from typing import Any

import torch
from data_parallel_link import OURS, Ranks
from data_parallel_stock import Times, bucket, fastest, turns
from namespaces import Link
from tables import append, read

from gradweave.compare.run import environment
from gradweave.compare.statistics import is_claim, paired_ratio, percentiles

RATIOS = (0.3, 0.6, 1.0, 1.5)
SIZES = (OURS, 25 << 20)
ROUNDS, STEPS = 5, 3
FREE_MEGABITS = 10_000.0
STOCK = {"ddp": "ddp_fused", "ddp, compiled": "ddp_compiled_fused"}
BF16 = {"ddp, bf16 hook": "ddp_bf16_fused", "ddp, compiled, bf16 hook": "ddp_compiled_bf16_fused"}
OURS_BY_NAME = {
    "compile(mesh=), replay": {"lower": "replay"},
    "compile(mesh=)": {"lower": "inductor"},
    "compile(mesh=), no barrier": {"lower": "inductor", "policy": "no_barrier"},
    "compile(mesh=), reverse first-k": {"lower": "inductor", "policy": "reverse_first_k"},
    "compile(mesh=), reverse first-k, replay": {"lower": "replay", "policy": "reverse_first_k"},
    "compile(mesh=), bf16": {"lower": "inductor", "reduce_dtype": "bfloat16"},
}
AGAIN = " (again)"


def make(ranks: Ranks, common: dict[str, Any], name: str, way: str, options: dict[str, Any]) -> None:
    ranks.do(job="make", name=name, way=way, options=options, **common)
    ranks.do(job="steps", name=name, count=2)


def measure(model: str, ratio: float, rounds: int, steps: int) -> list[dict[str, object]]:
    """All variants at one ratio, in turns."""
    common = {"model": model, "seconds": 0.0}
    with Link(FREE_MEGABITS) as link, Ranks(link, 1, pinned=True) as ranks:
        make(ranks, common, "free", "compile_fused", {"lower": "inductor"})
        compute = median(turns(ranks, ["free"], 3, steps)["free"])
        size = ranks.do(job="predict", megabits=1e6, bucket_bytes=OURS, default_bytes=25 << 20, **common)[0]["bytes"]
        ranks.do(job="drop")
        megabits = size * 8 / 1e6 / (ratio * compute)
        link.shape(megabits)
        chosen: dict[str, int] = {}
        for name, way in STOCK.items():
            named = {f"{name}, {size_of} bytes": size_of for size_of in SIZES}
            for each, size_of in named.items():
                make(ranks, common, each, way, bucket(size_of))
            ranked = turns(ranks, list(named), 2, 3)
            chosen[name] = named[fastest(ranked)]
            ranks.do(job="drop")
        for name, way in STOCK.items():
            make(ranks, common, name, way, bucket(chosen[name]))
        for (name, way), size_of in zip(BF16.items(), chosen.values(), strict=True):
            make(ranks, common, name, way, bucket(size_of))
        for name, options in OURS_BY_NAME.items():
            make(ranks, common, name, "compile_fused", options)
        everyone = [*STOCK, *BF16, *OURS_BY_NAME]
        first = turns(ranks, everyone, 1, steps)
        best = fastest({name: first[name] for name in STOCK})
        times = turns(ranks, [*everyone, best + AGAIN], rounds, steps)
        losses = {name: ranks.do(job="steps", name=name, count=1)[0]["loss"] for name in everyone}
    best = fastest({name: times[name] for name in STOCK})
    return rows_of(times, best, chosen, losses, model=model, r=ratio, compute_ms=1e3 * compute, megabits=megabits)


def rows_of(
    times: Times, best: str, chosen: dict[str, int], losses: dict[str, float], **about: Any
) -> list[dict[str, object]]:
    again = next(name for name in times if name.endswith(AGAIN))
    same = paired_ratio(times[again.removesuffix(AGAIN)], times[again])
    rows: list[dict[str, object]] = []
    for name, spent in times.items():
        low, middle, high = percentiles([1e3 * value for value in spent])
        over = paired_ratio(times[best], spent)
        rows.append(
            {
                "model": about["model"], "r": about["r"], "variant": name, "ms_20": f"{low:.2f}",
                "ms_50": f"{middle:.2f}", "ms_80": f"{high:.2f}", "best_stock": best,
                "over_best_stock": f"{over.value:.4f}", "over_best_stock_low": f"{over.low:.4f}",
                "over_best_stock_high": f"{over.high:.4f}", "a_a": f"{same.value:.4f}", "a_a_low": f"{same.low:.4f}",
                "a_a_high": f"{same.high:.4f}", "claim": "yes" if is_claim(over, same) else "no",
                "bucket_bytes": chosen.get(name.removesuffix(AGAIN), ""), "last_loss": losses.get(name, ""),
                "compute_ms": f"{about['compute_ms']:.2f}", "megabits": f"{about['megabits']:.2f}",
                "rounds": len(spent), **environment(torch.device("cpu")), "commit": os.environ.get("COMMIT", ""),
            }
        )  # fmt: skip
        print(f"   {name:26s} {middle:8.1f} ms  {over} of {best}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--model", default="gpt", choices=("gpt", "resnet18"))
    parser.add_argument("--ratio", action="append", type=float)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each variant in a round")
    arguments = parser.parse_args()
    done = {(row["model"], float(row["r"])) for row in read(arguments.results)}
    for ratio in arguments.ratio or RATIOS:
        if (arguments.model, ratio) not in done:
            print(f"{arguments.model}, r = {ratio}", flush=True)
            append(arguments.results, measure(arguments.model, ratio, arguments.rounds, arguments.steps))


if __name__ == "__main__":
    main()
