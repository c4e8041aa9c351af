"""What a step with Eva or Eva-f costs beside one with SGD or AdamW: time, memory, bytes.

    python benchmarks/eva_cost.py time --results benchmarks/results/eva-cost-h200.csv
    python benchmarks/eva_cost.py update --results benchmarks/results/eva-update-h200.csv
    python benchmarks/eva_cost.py phases --results benchmarks/results/eva-eager-phases-h200.csv

``time``: whole steps in three forms, eager, captured in one CUDA graph, and ``gradweave.compile``; of each form
SGD with momentum (fused), AdamW (fused), Eva and Eva-f take turns, each in a process of its own, and SGD twice. Where
much has no vectors (GPT-2's embeddings and head), Eva with SGD's rule for that is there too, in a graph.
Memory is that of the optimizer's state. ``update``: the optimizer's step alone, captured, and the bytes that it
would move in that time at the memory's measured speed, per parameter; 24 is the floor of a gradient that is read
twice, and a momentum and a weight that are read and written. ``phases``: what the host does of an eager step, by
phase, until the call returns, and how long it waits for the device in the end; optimizers take turns in one process.
Workloads that the results already hold are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from eva_tasks import Block
from step_variants import CUDA, Batch, Workload, captured, from_torchvision, images, loss_of, stock_step, tokens
from tables import append, read
from torch import nn
from torch.optim import Optimizer
from turns import AGAIN, Child, ready_ones, serve, take_turns

import gradweave
from gradweave.compare.models import GPT
from gradweave.compare.run import environment
from gradweave.compare.statistics import percentiles
from gradweave.optim import Eva, EvaF

BYTES_PER_SECOND = 4.3e12
"""What an H200 was measured to move."""
FORMS = ("eager", "captured", "compile")
OPTIMIZERS = ("sgd", "adamw", "eva", "eva-f")
BY_SGD = "+sgd"
"""Behind the name of an optimizer whose first-order rule is SGD's."""
REPEATS = 20
PHASES = ("forward", "backward", "step", "zero_grad", "waiting", "whole")
PHASED_STEPS = 30
TOGETHER = 2
"""Workloads whose variants make themselves ready at once."""


def resnet110() -> nn.Module:
    """18 blocks of each of three widths."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inputs = 16
    for outputs in (16, 32, 64):
        for number in range(18):
            layers.append(Block(inputs, outputs, 2 if number == 0 and outputs > 16 else 1))
            inputs = outputs
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def small_images(generator: torch.Generator) -> Batch:
    x = torch.randn(128, 3, 32, 32, generator=generator).contiguous(memory_format=torch.channels_last)
    return x, torch.randint(0, 10, (128,), generator=generator)


VARIANTS = tuple(f"{form} {optimizer}" for form in FORMS for optimizer in OPTIMIZERS)
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("resnet50-64", from_torchvision("resnet50"), images(64), "", 0, 0, VARIANTS),
        Workload("resnet110-128", resnet110, small_images, "", 0, 0, VARIANTS),
        Workload(
            "gpt2-2x1024", GPT, tokens(2), "", 0, 0, (*VARIANTS, f"captured eva{BY_SGD}", f"captured eva-f{BY_SGD}")
        ),
    )
}


def make_optimizer(name: str, model: nn.Module, *, capturable: bool) -> Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=capturable)
    rule = "sgd" if name.endswith(BY_SGD) else "adamw"
    cls = {"eva": Eva, "eva-f": EvaF}[name.removesuffix(BY_SGD)]
    return cls(model, lr=1e-3, capturable=capturable, first_order=rule)


def make_variant(variant: str, workload: Workload, note: Path | None = None) -> Callable[[Batch], torch.Tensor]:
    """A function that takes one training step; writes down the bytes of the optimizer's state."""
    form, name = variant.split()
    model = workload.model().train()
    optimizer = make_optimizer(name, model, capturable=form == "captured")
    if form == "compile":
        step = gradweave.compile(model, loss_of, optimizer)
        take: Callable[[Batch], torch.Tensor] = lambda batch: step(*batch)  # noqa: E731
    else:
        train = stock_step(model, optimizer)
        take = captured(train) if form == "captured" else lambda batch: train(*batch)

    def call(batch: Batch) -> torch.Tensor:
        loss = take(batch)
        if note is not None and not note.exists():
            note.write_text(str(state_bytes(optimizer)))
        return loss

    return call


def state_bytes(optimizer: Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in _tensors(state)]
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in values}.values())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


def measure(workload: Workload, children: dict[str, Child], ready: dict[str, Any], notes: Path, results: Path) -> None:
    """Each form by itself, against its own SGD."""
    for form in dict.fromkeys(name.split()[0] for name in children):
        baseline = f"{form} sgd"
        own = {name: child for name, child in children.items() if name.startswith(form) and name in ready}
        if baseline not in own:
            continue
        measured = take_turns(own, ready, baseline)
        adam = measured.get(f"{form} adamw")
        rows: list[dict[str, object]] = []
        for name, one in measured.items():
            held = note_of(notes, workload.name, name.removesuffix(AGAIN)).read_text()
            of_sgd = note_of(notes, workload.name, baseline).read_text()
            rows.append(
                {
                    "case": workload.name, "mode": name, "ms_20": f"{one.low:.4f}", "ms_50": f"{one.middle:.4f}",
                    "ms_80": f"{one.high:.4f}", "times_sgd": f"{1 / one.ratio.value:.4f}",
                    "times_sgd_low": f"{1 / one.ratio.high:.4f}", "times_sgd_high": f"{1 / one.ratio.low:.4f}",
                    "times_adamw": f"{one.middle / adam.middle:.4f}" if adam else "", "state_bytes": held,
                    "state_times_sgd": f"{int(held) / int(of_sgd):.4f}", **environment(CUDA),
                }
            )  # fmt: skip
            print(f"   {name:18s} {one.middle:8.3f} ms  {1 / one.ratio.value:.3f}x of SGD", flush=True)
        append(results, rows)


def note_of(folder: Path, workload: str, variant: str) -> Path:
    return folder / f"{workload} {variant}.bytes"


def measure_steps(workloads: Sequence[Workload], results: Path, forms: Sequence[str]) -> None:
    notes = results.with_suffix(".notes")
    notes.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(workloads), TOGETHER):
        everyone = {}
        for workload in workloads[first : first + TOGETHER]:
            wanted = [name for name in workload.variants if name.split()[0] in forms]
            children = {name: Child(__file__, workload.name, name, EVA_COST_NOTES=str(notes)) for name in wanted}
            everyone[workload.name] = (workload, children)
        ready = {name: ready_ones(children) for name, (_, children) in everyone.items()}
        for name, (workload, children) in everyone.items():
            print(name, flush=True)
            measure(workload, children, ready[name], notes, results)
            for child in children.values():
                child.close()


def measure_updates(workloads: Sequence[Workload], results: Path) -> None:
    """The step of each optimizer alone, captured and replayed."""
    for workload in workloads:
        rows: list[dict[str, object]] = []
        for name in OPTIMIZERS:
            model = workload.model().train()
            optimizer = make_optimizer(name, model, capturable=True)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for batch in workload.batches(3):
                    loss_of(model, *batch).backward()
                    optimizer.step()
                    for p in model.parameters():
                        p.grad.mul_(1e-3)  # type: ignore[union-attr]
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            low, middle, high = percentiles([1e3 * _replays(graph) for _ in range(9)])
            count = sum(p.numel() for p in model.parameters())
            rows.append(
                {
                    "case": workload.name, "mode": name, "ms_20": f"{low:.4f}", "ms_50": f"{middle:.4f}",
                    "ms_80": f"{high:.4f}", "parameters": count,
                    "bytes_per_parameter": f"{middle / 1e3 * BYTES_PER_SECOND / count:.1f}", **environment(CUDA),
                }
            )  # fmt: skip
            print(workload.name, name, f"{middle:.3f} ms", flush=True)
        append(results, rows)


def measure_phases(workloads: Sequence[Workload], results: Path) -> None:
    """Eager steps of each optimizer in turns, SGD twice in each; milliseconds of the host in each phase."""
    for workload in workloads:
        batches = workload.batches()
        everyone = {}
        for name in ("sgd", "eva", "eva-f"):
            model = workload.model().train()
            everyone[name] = (model, make_optimizer(name, model, capturable=False))
        order = [*everyone, "sgd" + AGAIN]
        times: dict[str, list[list[float]]] = {name: [] for name in order}
        for number in range(PHASED_STEPS):
            for name in order:
                taken = _phases(*everyone[name.removesuffix(AGAIN)], batches[number % len(batches)])
                if number >= REPEATS // 4:
                    times[name].append(taken)
        rows: list[dict[str, object]] = []
        for name, taken in times.items():
            middle = [percentiles([1e3 * value for value in one])[1] for one in zip(*taken, strict=True)]
            columns = {phase + "_ms": f"{value:.3f}" for phase, value in zip(PHASES, middle, strict=True)}
            rows.append({"case": workload.name, "mode": name, **columns, **environment(CUDA)})
            print(workload.name, name, columns, flush=True)
        append(results, rows)


def _phases(model: nn.Module, optimizer: Optimizer, batch: Batch) -> list[float]:
    """Seconds of an eager step's phases, and of the whole."""
    torch.cuda.synchronize()
    marks = [time.perf_counter()]
    loss = loss_of(model, *batch)
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    optimizer.step()
    marks.append(time.perf_counter())
    optimizer.zero_grad()
    marks.append(time.perf_counter())
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    return [*(b - a for a, b in pairwise(marks)), marks[-1] - marks[0]]


def _replays(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay, of several in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / REPEATS


def main() -> None:
    import os

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "update", "phases", "child"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--workload", action="append", choices=tuple(WORKLOADS), help="once for each; all unless given")
    parser.add_argument("--form", action="append", choices=FORMS, help="once for each; all unless given")
    parser.add_argument("--variant", help="of a child")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    workloads = [WORKLOADS[name] for name in arguments.workload or WORKLOADS]
    if arguments.what == "child":
        note = note_of(Path(os.environ["EVA_COST_NOTES"]), workloads[0].name, arguments.variant)
        serve(lambda: make_variant(arguments.variant, workloads[0], note), workloads[0].batches)
        return
    done = {row["case"] for row in read(arguments.results)}
    left = [workload for workload in workloads if workload.name not in done]
    if arguments.what == "time":
        measure_steps(left, arguments.results, arguments.form or FORMS)
    elif arguments.what == "update":
        measure_updates(left, arguments.results)
    else:
        measure_phases(left, arguments.results)


if __name__ == "__main__":
    main()
