"""Optimizer fusion against what torch offers: time, by model, batch size and optimizer; memory.

    python benchmarks/fusion.py time --results benchmarks/results/fusion-h200.csv --minutes 8
    python benchmarks/fusion.py memory --results benchmarks/results/fusion-memory-h200.csv
    python benchmarks/fusion.py draw --results benchmarks/results/fusion-h200.csv

Cases that the results already hold are left out, so that a table can be filled in several runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tables import append, read

from gradweave.compare import find_workload
from gradweave.compare.run import AGAIN, Comparison, compare, environment
from gradweave.compare.trial import Setting


@dataclass(frozen=True)
class Case:
    """One row of a figure."""

    figure: str
    model: str
    modes: tuple[str, ...] = ("backward", "forward", "auto")
    optimizer: str = "adamw"
    batch: int = 32
    dtype: str = "float32"
    max_norm: float | None = None
    steps: int = 150

    @property
    def key(self) -> str:
        clip = f" clip {self.max_norm}" if self.max_norm else ""
        return f"{self.figure}: {self.model} {self.optimizer} {self.batch} {self.dtype}{clip}"


ALL = ("loop", "foreach", "hook", "backward", "forward", "auto")
GPU_CASES = [
    Case("breakdown", "mobilenet_v2", ALL, steps=400),
    Case("clipping", "gpt2", ("forward", "auto"), batch=2, dtype="bfloat16", max_norm=1.0, steps=400),
    Case("models", "gpt2", batch=2, dtype="bfloat16", steps=250),
    *(Case("models", model, steps=400) for model in ("mlp", "resnet18", "gpt_small")),
    Case("batch", "mobilenet_v2", batch=8, steps=300),
    *(Case("batch", "mobilenet_v2", batch=batch, steps=60) for batch in (64, 128, 256)),
    *(
        Case("optimizers", "mobilenet_v2", ("foreach", "backward", "forward"), optimizer, steps=80)
        for optimizer in ("sgd", "adagrad", "rmsprop", "adadelta")
    ),
]
CPU_CASES = [
    Case("breakdown", "mlp", ALL, steps=300),
    Case("models", "autoencoder", ALL, batch=64, steps=300),
    Case("models", "gpt_small", ALL, batch=8, steps=200),
]


def rows_of(case: Case, comparison: Comparison) -> list[dict[str, object]]:
    again = next(result for result in comparison.results if result.label.endswith(AGAIN))
    return [
        {
            "case": case.key,
            "model": case.model,
            "optimizer": case.optimizer,
            "batch": case.batch,
            "dtype": case.dtype,
            "max_norm": case.max_norm or "",
            "mode": result.label,
            **{f"ms_{p}": f"{v:.4f}" for p, v in zip((20, 50, 80), result.milliseconds, strict=True)},
            **{f"{part}_ms": f"{values[1]:.4f}" for part, values in result.parts.items()},
            "speedup": f"{result.speedup.value:.4f}",
            "speedup_low": f"{result.speedup.low:.4f}",
            "speedup_high": f"{result.speedup.high:.4f}",
            "same_low": f"{again.speedup.low:.4f}",
            "same_high": f"{again.speedup.high:.4f}",
            "claim": result.claim,
            "identical": result.identical,
            "largest_difference": f"{result.difference:.3g}",
            "peak_bytes": result.peak_bytes or "",
            "chosen": result.description if result.label == "auto" else "",
            **comparison.environment,
        }
        for result in comparison.results
    ]


def measure_time(path: Path, minutes: float) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    ends = time.monotonic() + 60 * minutes
    done = {row["case"] for row in read(path)}
    for case in GPU_CASES if device.type == "cuda" else CPU_CASES:
        if case.key in done:
            continue
        if time.monotonic() > ends:
            print("time is up; run again for the rest")
            return
        began = time.monotonic()
        setting = Setting(
            find_workload(case.model), case.optimizer, case.batch, device, getattr(torch, case.dtype), case.max_norm
        )
        comparison = compare(setting, case.modes, steps=case.steps)
        append(path, rows_of(case, comparison))
        print(f"{case.key}  ({time.monotonic() - began:.0f} s)")
        for result in comparison.results:
            print(
                f"   {result.label:16s} {result.milliseconds[1]:8.3f} ms  {result.speedup}  same={result.identical}",
                flush=True,
            )
        del comparison
        if device.type == "cuda":
            torch.cuda.empty_cache()


MEMORY_CASE = """
import sys, torch
from torch.nn import functional
from gradweave import fuse
from gradweave.compare.models import GPT
mode, autocast = sys.argv[1], sys.argv[2] == "bfloat16"
torch.backends.cuda.matmul.allow_tf32 = True
torch.manual_seed(0)
with torch.device("cuda"):
    model = GPT(vocabulary=50304, width=1600, blocks=48, heads=25, tokens=256, recompute=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
fusion = fuse(model, optimizer, mode) if mode != "fused" else None
tokens = torch.randint(0, 50304, (1, 257), device="cuda")
for step in range(4):
    if step == 2:
        torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        logits = model(tokens[:, :-1])
    functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
gradients = sum(p.numel() * p.element_size() for p in model.parameters())
print(torch.cuda.max_memory_allocated(), gradients)
"""


def measure_memory(path: Path) -> None:
    """Peak memory of a 1.5-billion-parameter GPT, each mode in a process of its own.

    Under autocast the forward's cast copies of all weights set a floor of their own.
    """
    rows: list[dict[str, object]] = []
    for dtype in ("float32", "bfloat16"):
        peaks = {}
        for mode in ("fused", "backward", "forward"):
            command = [sys.executable, "-c", MEMORY_CASE, mode, dtype]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise SystemExit(ran.stderr)
            peaks[mode], gradients = map(int, ran.stdout.split())
            rows.append({"model": "gpt 1.5B, 1x256, recompute", "optimizer": "adamw", "dtype": dtype, "mode": mode,
                         "peak_bytes": peaks[mode], "gradient_bytes": gradients,
                         "saved_share_of_gradients": f"{(peaks['fused'] - peaks[mode]) / gradients:.4f}",
                         **environment(torch.device("cuda"))})  # fmt: skip
            print(rows[-1], flush=True)
    append(path, rows)


def draw(path: Path) -> None:
    """Bars of speed-up over the baseline, a group per case."""
    from matplotlib.figure import Figure

    rows = [row for row in read(path) if row["mode"] != "fused"]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(10, 0.24 * len(rows) + 1.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    colours = {"backward": "#228833", "forward": "#4477aa", "auto": "#ee7733"}
    place, ticks, labels = 0.0, [], []
    for case in cases:
        for row in (r for r in rows if r["case"] == case):
            value, low, high = (float(row[key]) for key in ("speedup", "speedup_low", "speedup_high"))
            axes.barh(place, value, height=0.8, color=colours.get(row["mode"], "#bbbbbb"))
            spread = [[max(0, value - low)], [max(0, high - value)]]
            axes.errorbar(value, place, xerr=spread, color="black", linewidth=0.8, capsize=2)
            ticks.append(place)
            labels.append(f"{case.rpartition(': ')[2]}  {row['mode']}")
            place += 1
        place += 0.6
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(ticks, labels=labels, fontsize=7)
    axes.invert_yaxis()
    where = f"{rows[0]['device']}, torch {rows[0]['torch']}"
    axes.set_xlabel(f"speed-up over the stock fused (or foreach) optimizer\n95% interval; {where}")
    figure.savefig(path.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "draw"))
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    arguments = parser.parse_args()
    if arguments.what == "time":
        measure_time(arguments.results, arguments.minutes)
    elif arguments.what == "memory":
        measure_memory(arguments.results)
    else:
        draw(arguments.results)


if __name__ == "__main__":
    main()
