"""Weight gradients out of order against the same captured step in stock order.

    python benchmarks/reorder.py time --results benchmarks/results/reorder-h200.csv
    python benchmarks/reorder.py time --workload resnet50-8 --results benchmarks/results/reorder-h200.csv

``split`` has the layers split as ``side_stream`` has, and captured, but on one stream: between these two
only the schedule differs. ``captured`` is the stock step in one CUDA graph, ``eager`` the stock step.
Workloads that the results already hold are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from step_variants import CUDA, Batch, Workload, captured, from_torchvision, images, make_optimizer, stock_step, tokens
from torch import nn
from turns import Child, ready_ones, serve, take_turns

from fusion import append, read
from gradweave.compare.run import environment
from gradweave.split.attach import Reordering, reorder
from gradweave.split.streams import InLine
from gradweave.zoo import GPT

BASELINE = "split"
VARIANTS = ("eager", "captured", "split", "side_stream")
MEGABYTE = 1 << 20


def densenet(growth: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from torchvision.models import DenseNet

        return DenseNet(growth, (6, 12, 24, 16), 2 * growth).to(memory_format=torch.channels_last)

    return make


WORKLOADS = {
    workload.name: workload
    for workload in (
        *(
            Workload(f"densenet121-k{growth}-{batch}", densenet(growth), images(batch), "sgd", 0, 0, VARIANTS)
            for growth in (12, 32)
            for batch in (8, 32)
        ),
        Workload("mobilenet_v3_large-32", from_torchvision("mobilenet_v3_large"), images(32), "sgd", 0, 0, VARIANTS),
        Workload("resnet50-8", from_torchvision("resnet50"), images(8), "sgd", 0, 0, VARIANTS),
        Workload("gpt2-2x256", lambda: GPT(tokens=256), tokens(2, 256), "adamw", 0, 0, VARIANTS),
        Workload("gpt2-2x1024", GPT, tokens(2), "adamw", 0, 0, VARIANTS),
    )
}


def make_variant(name: str, workload: Workload) -> Callable[[Batch], torch.Tensor]:
    """A function that takes one training step."""
    model = workload.model().train()
    optimizer = make_optimizer(workload.optimizer, model, fused=True, capturable=name != "eager")
    if name == "split":
        Reordering(model, InLine(), None)
    elif name == "side_stream":
        reorder(model)
    train = stock_step(model, optimizer)
    return captured(train) if name != "eager" else lambda batch: train(*batch)


def measure(workload: Workload, children: dict[str, Child], ready: dict[str, dict[str, object]]) -> None:
    rows: list[dict[str, object]] = []
    for name, one in take_turns(children, ready, BASELINE).items():
        row = {
            "case": workload.name, "mode": name, "ms_20": f"{one.low:.4f}", "ms_50": f"{one.middle:.4f}",
            "ms_80": f"{one.high:.4f}", "speedup": f"{one.ratio.value:.4f}", "speedup_low": f"{one.ratio.low:.4f}",
            "speedup_high": f"{one.ratio.high:.4f}", "peak_mib": f"{one.ready['peak'] / MEGABYTE:.0f}",
            "largest_relative_loss_difference": f"{one.off:.2e}", "against": BASELINE, **environment(CUDA),
        }  # fmt: skip
        rows.append(row)
        print(f"   {name:20s} {one.middle:8.3f} ms  {one.ratio}  losses within {one.off:.1e}", flush=True)
    append(arguments.results, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "child"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--workload", action="append", choices=tuple(WORKLOADS), help="once for each; all unless given")
    parser.add_argument("--variant")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    chosen = [WORKLOADS[name] for name in arguments.workload or WORKLOADS]
    if arguments.what == "child":
        serve(lambda: make_variant(arguments.variant, chosen[0]), chosen[0].batches)
        raise SystemExit
    done = {row["case"] for row in read(arguments.results)}
    for workload in chosen:
        if workload.name in done:
            continue
        print(workload.name, flush=True)
        children = {name: Child(__file__, workload.name, name) for name in workload.variants}
        ready = ready_ones(children)
        if BASELINE in ready:
            measure(workload, {name: child for name, child in children.items() if name in ready}, ready)
        for child in children.values():
            child.close()
