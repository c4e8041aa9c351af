"""Why the family's defaults are what they are: one choice at a time, on the autoencoder.

    python benchmarks/eva_choices.py --data FOLDER --results benchmarks/results/eva-choices-cpu.csv --minutes 8

Trials that the results hold already are left out. 300 steps of batch 250, from two seeds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from eva_convergence import append, read, share_of
from eva_tasks import Task, autoencoder
from torch import nn
from torch.optim import Optimizer

from gradweave.compare.run import environment
from gradweave.optim import Eva, EvaF, EvaS
from gradweave.optim.rules import LAYER, ROW

STEPS = 300
SEEDS = (0, 1)


def changed(cls: Any, *, lr: float, manner: dict[str, Any] | None = None, **options: Any) -> Callable[..., Optimizer]:
    """An optimizer of the family with something about it changed."""

    def make(model: nn.Module) -> Optimizer:
        optimizer: Any = cls(model, lr=lr, **options)
        optimizer.update_rule = replace(optimizer.update_rule, **(manner or {}))
        return optimizer

    return make


CHOICES: dict[str, Callable[..., Optimizer]] = {
    "eva-f": changed(EvaF, lr=0.04),
    "eva": changed(Eva, lr=0.04),
    "eva-f lr 0.02": changed(EvaF, lr=0.02),
    "eva-f lr 0.06": changed(EvaF, lr=0.06),
    "eva-f lr 0.1": changed(EvaF, lr=0.1),
    "eva-f momentum behind, lr 0.02": changed(EvaF, lr=0.02, manner={"momentum_first": False}),
    "eva-f momentum behind, lr 0.03": changed(EvaF, lr=0.03, manner={"momentum_first": False}),
    "eva-f by layer": changed(EvaF, lr=0.04, manner={"trust": LAYER}),
    "no vectors, lr 0.02": changed(EvaF, lr=0.02, damping=1e6),
    "no vectors, lr 0.04": changed(EvaF, lr=0.04, damping=1e6),
    "eva-f average 0.95": changed(EvaF, lr=0.04, running_average=0.95),
    "eva-f average 0.1": changed(EvaF, lr=0.04, running_average=0.1),
    "eva-f damping 0.1": changed(EvaF, lr=0.04, damping=0.1),
    "eva-f damping 0.001": changed(EvaF, lr=0.04, damping=0.001),
    "eva-f momentum 0.95": changed(EvaF, lr=0.04, momentum=0.95),
    "eva-f 16 samples": changed(EvaF, lr=0.04, samples=16),
    "eva lr 0.02": changed(Eva, lr=0.02),
    "eva lr 0.06": changed(Eva, lr=0.06),
    "eva by layer": changed(Eva, lr=0.04, manner={"trust": LAYER}),
    "eva average 0.95": changed(Eva, lr=0.04, running_average=0.95),
    "eva output damping 0.3": changed(Eva, lr=0.04, output_damping=0.3),
    "eva output damping 1": changed(Eva, lr=0.04, output_damping=1.0),
    "eva-s": changed(EvaS, lr=0.01),
    "eva-s by row": changed(EvaS, lr=0.01, manner={"trust": ROW}),
    "eva-s average 0.95": changed(EvaS, lr=0.01, running_average=0.95),
    "eva-s damping 0.03": changed(EvaS, lr=0.01, damping=0.03),
    "eva-f reference lr 0.3": changed(EvaF, lr=0.3, reference=True),
    "eva reference lr 0.1": changed(Eva, lr=0.1, reference=True),
    "eva-s reference lr 0.6": changed(EvaS, lr=0.6, reference=True),
    "adamw lr 0.002": lambda m: torch.optim.AdamW(m.parameters(), lr=0.002, weight_decay=0.0),
    "sgd lr 0.6": lambda m: torch.optim.SGD(m.parameters(), lr=0.6, momentum=0.9),
}


def train(task: Task, make: Callable[..., Optimizer], seed: int) -> float:
    """The test error at the end; not a number if training diverged."""
    torch.manual_seed(seed)
    model = task.make_model()
    optimizer = make(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(1000 + seed)
    for step in range(STEPS):
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * share_of(step, STEPS)
        loss = task.loss(model, *task.batch(generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49 and not math.isfinite(float(loss.detach())):
            return math.nan
    with torch.no_grad():
        return task.test(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, help="only this one, so that several can run side by side")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    task = autoencoder(arguments.data, device, toy=True)
    began = time.perf_counter()
    for seed in SEEDS if arguments.seed is None else (arguments.seed,):
        for name, make in CHOICES.items():
            known = {(row["choice"], row["seed"]) for row in read(arguments.results)}
            if (name, str(seed)) in known or time.perf_counter() - began > 60 * arguments.minutes:
                continue
            error = train(task, make, seed)
            row = {"choice": name, "seed": seed, "steps": STEPS, "test_error": f"{error:.4f}"}
            append(arguments.results, [{**row, **environment(torch.device(device))}])
            print(row, flush=True)


if __name__ == "__main__":
    main()
