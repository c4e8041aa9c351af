"""``gradweave.compile`` against what torch offers: whole training steps, interleaved in one process.

    python benchmarks/whole_step.py time --results benchmarks/results/whole-step-h200.csv --minutes 8
    python benchmarks/whole_step.py profile --workload gpt2-2x1024
    python benchmarks/whole_step.py draw --results benchmarks/results/whole-step-h200.csv

Workloads that the results already hold are left out, so that a table can be filled in several runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import gradweave
from fusion import append, draw, read
from gradweave.compare.data import token_sequences
from gradweave.compare.run import environment
from gradweave.compare.statistics import paired_ratio, percentiles
from gradweave.zoo import GPT

BASELINE = "compile_ro"
ROUNDS, STEPS = 9, 20
CHECKED_STEPS = 10
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Workload:
    """A model and its batches, the same for all variants."""

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    optimizer: str
    flops: float
    variants: tuple[str, ...]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make_model().to(CUDA)

    def batches(self, count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        return [tuple(x.to(CUDA) for x in self.make_batch(generator)) for _ in range(count)]  # type: ignore[misc]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        output = model(x)
    return functional.cross_entropy(output.flatten(0, -2).float(), y.flatten())


def tokens(rows: int) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    def make(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        made = token_sequences(rows, 1025, 50304, generator)
        return made[:, :-1].contiguous(), made[:, 1:].contiguous()

    return make


def images(count: int) -> Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]:
    def make(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 3, 224, 224, generator=generator).contiguous(memory_format=torch.channels_last)
        return x, torch.randint(0, 1000, (count,), generator=generator)

    return make


def from_torchvision(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import torchvision

        model: nn.Module = torchvision.models.get_model(name)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    return make


_ALL = ("eager", "compile_ro", "graph_compile", "step", "step_clip")
WORKLOADS = [
    Workload("gpt2-2x1024", GPT, tokens(2), "adamw", 6 * 124e6 * 2048 + 12 * 12 * 768 * 1024 * 2048, _ALL),
    Workload("mobilenet_v2-32", from_torchvision("mobilenet_v2"), images(32), "adamw", 3 * 2 * 0.3e9 * 32, _ALL),
    Workload("resnet50-32", from_torchvision("resnet50"), images(32), "sgd", 3 * 2 * 4.09e9 * 32, _ALL),
    Workload("gpt2-8x1024", GPT, tokens(8), "adamw", 4 * (6 * 124e6 * 2048 + 12 * 12 * 768 * 1024 * 2048), _ALL[1:]),
]


def make_optimizer(name: str, model: nn.Module, **form: bool) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, **form)
    form.pop("capturable", None)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, **form)


Batch = tuple[torch.Tensor, torch.Tensor]


def make_variant(name: str, workload: Workload) -> Callable[[Batch], torch.Tensor]:
    """A function that takes one training step."""
    model = workload.model().train()
    if name.startswith("step"):
        optimizer = make_optimizer(workload.optimizer, model)
        step = gradweave.compile(model, loss_of, optimizer, max_grad_norm=1.0 if name == "step_clip" else None)
        return lambda batch: step(*batch)
    capturable = name == "graph_compile"
    form = {"foreach": True} if name == "eager" else {"fused": True, "capturable": capturable}
    optimizer = make_optimizer(workload.optimizer, model, **form)
    mode = {"compile_ro": "reduce-overhead", "graph_compile": "default"}.get(name)
    forward = model if mode is None else torch.compile(model, mode=mode)

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(forward, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return captured(train) if capturable else lambda batch: train(*batch)


def captured(train: Callable[..., torch.Tensor]) -> Callable[[Batch], torch.Tensor]:
    """The whole step in one CUDA graph, captured at the fourth call."""
    static: list[torch.Tensor] = []
    graph = torch.cuda.CUDAGraph()
    result: list[torch.Tensor] = []
    calls = 0

    def call(batch: Batch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls <= 3:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = train(*batch)
            torch.cuda.current_stream().wait_stream(side)
            return loss
        if not result:
            static.extend(x.clone() for x in batch)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                result.append(train(*static))
        for there, x in zip(static, batch, strict=True):
            there.copy_(x)
        graph.replay()
        return result[0].clone()

    return call


def measure(workload: Workload) -> list[dict[str, object]]:
    batches = workload.batches()
    calls: dict[str, Callable[[Batch], torch.Tensor]] = {}
    losses: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    for name in workload.variants:
        began = time.perf_counter()
        calls[name] = make_variant(name, workload)
        losses[name] = [calls[name](batches[i % 4]).item() for i in range(CHECKED_STEPS)]
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - began
        print(f"  {name}: ready after {seconds[name]:.1f} s, loss {losses[name][-1]:.5f}", flush=True)
    order = [*workload.variants, BASELINE + " (again)"]
    times: dict[str, list[float]] = {name: [] for name in order}
    for number in range(ROUNDS):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            call = calls[name.removesuffix(" (again)")]
            torch.cuda.synchronize()
            began = time.perf_counter()
            for index in range(STEPS):
                call(batches[index % 4])
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - began) / STEPS)
    rows: list[dict[str, object]] = []
    for name in order:
        own = name.removesuffix(" (again)")
        low, middle, high = percentiles([1e3 * t for t in times[name]])
        ratio = paired_ratio(times[BASELINE], times[name])
        first = losses[workload.variants[0]]
        off = max(abs(a - b) / abs(a) for a, b in zip(first, losses[own], strict=True))
        rows.append(
            {
                "case": workload.name, "mode": name, "ms_20": f"{low:.4f}", "ms_50": f"{middle:.4f}",
                "ms_80": f"{high:.4f}", "speedup": f"{ratio.value:.4f}", "speedup_low": f"{ratio.low:.4f}",
                "speedup_high": f"{ratio.high:.4f}", "start_seconds": f"{seconds[own]:.1f}",
                "largest_relative_loss_difference": f"{off:.2e}", "against": BASELINE,
                "floor_ms": f"{1e3 * workload.flops / 790e12:.3f}", **environment(CUDA),
            }
        )  # fmt: skip
        print(f"   {name:20s} {middle:8.3f} ms  {ratio}  losses within {off:.1e}", flush=True)
    return rows


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
    parser.add_argument("what", choices=("time", "profile", "draw"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--workload")
    parser.add_argument("--variant", default="step")
    parser.add_argument("--variants", help="only these, with commas between them")
    arguments = parser.parse_args()
    if arguments.what == "draw":
        draw(arguments.results, baseline=BASELINE, over='torch.compile(mode="reduce-overhead") and a fused optimizer')
        return
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    chosen = [w for w in WORKLOADS if arguments.workload in (None, w.name)]
    if arguments.what == "profile":
        for workload in chosen:
            profile(workload, arguments.variant)
        return
    ends = time.monotonic() + 60 * arguments.minutes
    done = {row["case"] for row in read(arguments.results)}
    for workload in chosen:
        if workload.name in done:
            continue
        if time.monotonic() > ends:
            print("time is up; run again for the rest")
            return
        print(workload.name, flush=True)
        if arguments.variants:
            workload = replace(workload, variants=tuple(arguments.variants.split(",")))
        append(arguments.results, measure(workload))
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
