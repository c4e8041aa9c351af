"""``gradweave.compile`` against what torch and JAX offer: whole training steps.

    python benchmarks/whole_step.py time --results benchmarks/results/whole-step-h200.csv
    python benchmarks/whole_step.py curves --text some.txt --results benchmarks/results/whole-step-curves-h200.csv
    python benchmarks/whole_step.py profile --workload gpt2-2x1024

Each variant has a process of its own, so that none shares memory pools or caches with another. All of
them make themselves ready at once; then they take turns, a few steps at a time, one at a time.
Workloads that the results already hold are left out, so that a table can be filled in several runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from step_variants import CUDA, WORKLOADS, Workload, make_variant
from tables import append, read
from turns import Child, ready_ones, serve, take_turns

from gradweave.compare.run import environment

BASELINE = "compile_ro"
COMPILING = {"step": 2, "step_clip": 2}
"""Steps behind which a variant is compiled: one, unless given. ``peak_mib`` is that of the others."""
MEGABYTE = 1 << 20
FLOPS_PER_SECOND, BYTES_PER_SECOND = 790e12, 4.3e12
"""What an H200 was measured to do."""


def use_fast_settings() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")


def measure(
    workload: Workload, children: dict[str, Child], ready: dict[str, dict[str, Any]]
) -> list[dict[str, object]]:
    """Has the variants of a workload take turns."""
    rows: list[dict[str, object]] = []
    floors = workload.flops / FLOPS_PER_SECOND, workload.update_bytes / BYTES_PER_SECOND
    for name, one in take_turns(children, ready, BASELINE).items():
        rows.append(
            {
                "case": workload.name, "mode": name, "ms_20": f"{one.low:.4f}", "ms_50": f"{one.middle:.4f}",
                "ms_80": f"{one.high:.4f}", "speedup": f"{one.ratio.value:.4f}", "speedup_low": f"{one.ratio.low:.4f}",
                "speedup_high": f"{one.ratio.high:.4f}",
                "peak_mib": f"{max(one.ready['peaks'][COMPILING.get(name, 1) :]) / MEGABYTE:.0f}",
                "first_step_peak_mib": f"{one.ready['peaks'][0] / MEGABYTE:.0f}",
                "largest_relative_loss_difference": f"{one.off:.2e}", "against": BASELINE,
                "flops_floor_ms": f"{1e3 * floors[0]:.3f}", "update_floor_ms": f"{1e3 * floors[1]:.3f}",
                **environment(CUDA),
            }
        )  # fmt: skip
        print(f"   {name:20s} {one.middle:8.3f} ms  {one.ratio}  losses within {one.off:.1e}", flush=True)
    return rows


def measure_times(workloads: list[Workload], variants: list[str] | None, results: Path) -> None:
    everyone = {
        workload.name: {name: Child(__file__, workload.name, name) for name in variants or workload.variants}
        for workload in workloads
    }
    ready = {name: ready_ones(children) for name, children in everyone.items()}
    for workload in workloads:
        children = everyone[workload.name]
        print(workload.name, flush=True)
        if BASELINE in ready[workload.name]:
            able = {name: child for name, child in children.items() if name in ready[workload.name]}
            append(results, measure(workload, able, ready[workload.name]))
        for child in children.values():
            child.close()


def measure_curves(text: Path, results: Path) -> None:
    """Losses of 300 steps on real text in bf16: eager, torch.compile and the whole step.

    Eager runs with the rows of each batch in another order show how far rounding alone takes them apart.
    """
    from curves import train_on_text

    eager = [f"eager, rows moved by {count}" for count in (1, 5, 11)]
    losses = {name: train_on_text(text, name) for name in ("eager", *eager, "compile", "step")}
    rows: list[dict[str, object]] = [
        {
            "steps_taken": number,
            **{name: f"{values[number]:.5f}" for name, values in losses.items()},
            **environment(CUDA),
        }
        for number in range(len(losses["eager"]))
    ]
    append(results, rows)
    for name, values in losses.items():
        apart = [b - a for a, b in zip(losses["eager"], values, strict=True)]
        last = sum(values[-50:]) / 50
        print(f"   {name:30s} last 50: {last:.4f}  mean difference {sum(apart) / len(apart):+.5f}", flush=True)


def profile(workload: Workload, variant: str) -> None:
    """Where the time of a step goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    call, batches = make_variant(variant, workload), workload.batches()
    for index in range(8):
        call(batches[index % 4])
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        for index in range(5):
            call(batches[index % 4])
        torch.cuda.synchronize()
    kernels = sorted(recorded.key_averages(), key=lambda e: -e.device_time_total)
    total = sum(k.device_time_total for k in kernels)
    print(f"{workload.name} {variant}: {total / 5e3:.3f} ms of kernels, {sum(k.count for k in kernels) // 5} a step")
    for kernel in kernels[:45]:
        print(f"  {kernel.device_time_total / 5e3:8.4f} ms {kernel.count // 5:5d}x  {kernel.key[:150]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "curves", "profile", "child"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--workload", action="append", choices=tuple(WORKLOADS), help="once for each; all unless given")
    parser.add_argument("--variant", default="step")
    parser.add_argument("--variants", help="only these, with commas between them")
    arguments = parser.parse_args()
    use_fast_settings()
    workloads = [WORKLOADS[name] for name in arguments.workload or WORKLOADS]
    if arguments.what == "child":
        serve(lambda: make_variant(arguments.variant, workloads[0]), workloads[0].batches)
    elif arguments.what == "curves":
        measure_curves(arguments.text, arguments.results)
    elif arguments.what == "profile":
        for workload in workloads:
            profile(workload, arguments.variant)
    else:
        done = {row["case"] for row in read(arguments.results)}
        left = [workload for workload in workloads if workload.name not in done]
        variants = arguments.variants.split(",") if arguments.variants else None
        if variants is not None and BASELINE not in variants:
            parser.error(f"--variants needs {BASELINE}, which the others are compared with")
        measure_times(left, variants, arguments.results)


if __name__ == "__main__":
    main()
