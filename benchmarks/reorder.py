"""Weight gradients out of order, step by step: what each part of it gives.

    python benchmarks/reorder.py time --results benchmarks/results/reorder-h200.csv --minutes 8
    python benchmarks/reorder.py time --workload resnet50-8 --results benchmarks/results/reorder-h200.csv
    python benchmarks/reorder.py costs --results benchmarks/results/reorder-costs-seconds-h200.csv
    python benchmarks/reorder.py draw --results benchmarks/results/reorder-h200.csv

``eager`` is the stock step, ``captured`` the same in one CUDA graph. ``split`` has the layers split as the
following have, captured on one stream: between it and them only the schedule differs. All are captured on a stream
of high priority, so that weight gradients on the second one fill its gaps and do not hold it up. ``side_stream``,
``joint`` and ``joint_bounded`` (with a bound of bytes) are captured too. A graph cannot leave work to the next, so
``cross_step`` has four steps in each graph, and weight gradients cross three borders of four; ``forward`` is the same
with the layers split on one stream: forward-fusion alone. Their peak of memory is that of eager steps. ``compile`` is
``gradweave.compile``, ``compile_costs`` the same with ``costs``: on two streams where they say that it pays.

The costs that ``joint`` and ``cross_step`` plan by are measured first, one workload at a time (their steps are
traced at the same time, which takes longer), and kept beside the results; what a schedule predicts from them is in
the table beside what was measured. Then all variants of some workloads make themselves ready at once, each in a
process of its own, and take turns, one at a time. Workloads that the results already hold are left out, and none is
begun that would end after ``--minutes``. ``costs`` times measuring them, one workload after the other, without cuDNN's
search for its best kernels, which takes many times as long and which training has to do anyway.

Without a GPU only the two toy workloads are run, to see that everything works: nothing is captured there, and
their times mean nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from step_variants import (
    Batch,
    Workload,
    captured,
    from_torchvision,
    images,
    loss_of,
    make_optimizer,
    stock_step,
    tokens,
)
from tables import append, read
from torch import nn
from turns import AGAIN, CHECKED_STEPS, Child, ChildFailedError, ready_ones, serve, take_turns

import gradweave
from gradweave._runtime.split_calls.queue import InlineLane
from gradweave.compare.models import GPT
from gradweave.compare.run import environment
from gradweave.fusion import Fusion
from gradweave.profile import cached_costs, measure_costs
from gradweave.reordering.api import Reordering, reorder
from gradweave.schedule import Costs, plan, single

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BASELINE = "split"
SPLIT = ("eager", "captured", "split", "side_stream", "joint", "joint_bounded", "forward", "cross_step")
ALL = (*SPLIT, "compile", "compile_costs")
POLICY_OF = {
    "captured": "in_order", "split": "in_order", "side_stream": "side_stream", "joint": "joint",
    "joint_bounded": "joint", "forward": "forward_fusion", "cross_step": "cross_step",
}  # fmt: skip
"""The schedule that predicts a variant's step time; eager steps are bound by the host, which none knows."""
MEGABYTE = 1 << 20
NOTED_AT = 8
UNROLLED = 4
FIRST = -1
"""Priority of the stream that every step is captured on; that of the second stream is the default, which is lower."""


@dataclass(frozen=True)
class Case(Workload):
    """A workload on the device that is there.

    Attributes:
        budget: Bytes that ``joint_bounded`` may hold.
    """

    budget: int = 32 * MEGABYTE

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make_model().to(DEVICE)

    def batches(self, count: int = 4) -> list[Batch]:
        generator = torch.Generator().manual_seed(0)
        return [tuple(x.to(DEVICE) for x in self.make_batch(generator)) for _ in range(count)]  # type: ignore[misc]


def densenet(growth: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from torchvision.models import DenseNet

        return DenseNet(growth, (6, 12, 24, 16), 2 * growth).to(memory_format=torch.channels_last)

    return make


def toy_convolutions() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3)]
    for _ in range(3):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10))


def toy_images(generator: torch.Generator) -> Batch:
    return torch.randn(4, 3, 12, 12, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def ready_made(make: Callable[[], nn.Module], batch: Callable[[torch.Generator], Batch]) -> Callable[[], nn.Module]:
    """A model whose lazy layers are made."""

    def made() -> nn.Module:
        model = make()
        model(batch(torch.Generator())[0])
        return model

    return made


WORKLOADS = {
    case.name: case
    for case in (
        *(
            Case(f"densenet121-k{growth}-{batch}", densenet(growth), images(batch), "sgd", 0, 0,
                 ALL if (growth, batch) == (32, 8) else SPLIT)
            for growth in (12, 32)
            for batch in (8, 32)
        ),
        Case("mobilenet_v3_large-32", from_torchvision("mobilenet_v3_large"), images(32), "sgd", 0, 0, ALL),
        Case("resnet50-8", from_torchvision("resnet50"), images(8), "sgd", 0, 0, SPLIT),
        Case("gpt2-2x256", lambda: GPT(tokens=256), tokens(2, 256), "adamw", 0, 0, ALL),
        Case("gpt2-2x1024", GPT, tokens(2), "adamw", 0, 0, ALL),
    )
}  # fmt: skip
TOYS = {
    case.name: case
    for case in (
        Case("toy-gpt", lambda: GPT(vocabulary=50304, width=16, blocks=2, heads=2, tokens=8), tokens(2, 8), "adamw",
             0, 0, ALL, budget=2048),
        Case("toy-convolutions", ready_made(toy_convolutions, toy_images), toy_images, "sgd", 0, 0, ALL, budget=2048),
    )
}  # fmt: skip
CASES = {**WORKLOADS, **TOYS}


def costs_of(case: Case, folder: Path) -> Costs:
    """Measured, or as they were measured before; one process at a time has the GPU for it, once none is tracing."""
    model = case.model().train()
    optimizer = make_optimizer(case.optimizer, model, fused=True)
    with (folder / "lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_SH)
        traced = False

        def progress(_: str, done: float) -> None:
            nonlocal traced
            if done > 0 and not traced:
                traced = True
                fcntl.flock(turn, fcntl.LOCK_UN)
                fcntl.flock(turn, fcntl.LOCK_EX)

        return cached_costs(
            model, loss_of, optimizer, case.batches(1)[0], folder=folder, also="bfloat16 by autocast", progress=progress
        )


class Noted:
    """A variant that writes down, after some steps, what it has held."""

    def __init__(self, call: Callable[[Batch], torch.Tensor | None], handle: Reordering | None, path: Path) -> None:
        self._call, self._handle, self._path = call, handle, path
        self._calls = 0

    def __call__(self, batch: Batch) -> torch.Tensor | None:
        self._calls += 1
        if self._calls == NOTED_AT:
            handle = self._handle
            note = {} if handle is None else {"held": handle.most_bytes_held, "does": handle.explain()}
            self._path.write_text(json.dumps(note))
        return self._call(batch)


def make_variant(name: str, case: Case, folder: Path) -> Noted:
    """A function that takes one training step."""
    model = case.model().train()
    path = note_path(folder, case, name)
    if name.startswith("compile"):
        costs = costs_of(case, folder) if name == "compile_costs" else None
        step = gradweave.compile(model, loss_of, make_optimizer(case.optimizer, model), costs=costs)
        return Noted(lambda batch: step(*batch), None, path)
    in_graph = name != "eager" and DEVICE.type == "cuda"
    optimizer = make_optimizer(case.optimizer, model, fused=True, capturable=in_graph)
    handle: Reordering | None = None
    fusion = gradweave.fuse(model, optimizer, "forward") if name in ("forward", "cross_step") else None
    if name in ("split", "forward"):
        handle = Reordering(model, InlineLane(), None)
    elif name == "side_stream":
        handle = reorder(model, "side_stream")
    elif name in ("joint", "joint_bounded", "cross_step"):
        budget = case.budget if name == "joint_bounded" else None
        handle = reorder(model, name.removesuffix("_bounded"), costs=costs_of(case, folder), byte_budget=budget)
    train = stock_step(model, optimizer)
    if not in_graph:
        return Noted(lambda batch: train(*batch), handle, path)
    return Noted(captured(train, priority=FIRST) if fusion is None else several_captured(train, fusion), handle, path)


def several_captured(train: Callable[..., torch.Tensor], fusion: Fusion) -> Callable[[Batch], torch.Tensor | None]:
    """Steps in a CUDA graph of several, from the first that is not looked at on; each graph waits for its last batch.

    Until then they are eager; the same steps, with the same losses.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(priority=FIRST)
    static: list[list[torch.Tensor]] = []
    calls = 0

    def capture(batch: Batch) -> None:
        static.extend([x.clone() for x in batch] for _ in range(UNROLLED))
        fusion.flush()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream), fusion.in_graph():
            for one in static:
                train(*one)

    def call(batch: Batch) -> torch.Tensor | None:
        nonlocal calls
        calls += 1
        if calls <= CHECKED_STEPS:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = train(*batch)
            torch.cuda.current_stream().wait_stream(stream)
            return loss
        if not static:
            capture(batch)
        place = (calls - 1 - CHECKED_STEPS) % UNROLLED
        for there, x in zip(static[place], batch, strict=True):
            there.copy_(x)
        if place == UNROLLED - 1:
            graph.replay()
        return None

    return call


def note_path(folder: Path, case: Case, name: str) -> Path:
    return folder / f"{case.name}-{name}.note.json"


def predictions(costs: Costs) -> dict[str, float]:
    """Milliseconds per step of each schedule."""
    graph = single(costs, steps=2)
    return {name: 1e3 * plan(graph, policy=name).simulate().step_time for name in dict.fromkeys(POLICY_OF.values())}


def measure(case: Case, children: dict[str, Child], ready: dict[str, dict[str, object]], folder: Path) -> None:
    predicted = predictions(costs_of(case, folder))
    rows: list[dict[str, object]] = []
    for name, one in take_turns(children, ready, arguments.baseline).items():
        variant = name.removesuffix(AGAIN)
        note = json.loads(note_path(folder, case, variant).read_text())
        expected = predicted.get(POLICY_OF.get(variant, ""))
        row = {
            "case": case.name, "mode": name, "ms_20": f"{one.low:.4f}", "ms_50": f"{one.middle:.4f}",
            "ms_80": f"{one.high:.4f}", "speedup": f"{one.ratio.value:.4f}", "speedup_low": f"{one.ratio.low:.4f}",
            "speedup_high": f"{one.ratio.high:.4f}", "peak_mib": f"{max(one.ready['peaks'][1:]) / MEGABYTE:.1f}",
            "largest_relative_loss_difference": f"{one.off:.2e}", "against": arguments.baseline,
            "predicted_ms": "" if expected is None else f"{expected:.4f}",
            "predicted_off": "" if expected is None else f"{expected / one.middle - 1:+.3f}",
            "budget_mib": f"{case.budget / MEGABYTE:.3f}" if variant == "joint_bounded" else "",
            "held_mib": f"{note['held'] / MEGABYTE:.3f}" if "held" in note else "",
            "does": note.get("does", ""), **environment(DEVICE),
        }  # fmt: skip
        rows.append(row)
        print(f"   {name:20s} {one.middle:8.3f} ms  {one.ratio}  losses within {one.off:.1e}", flush=True)
    append(arguments.results, rows)


def time_costs(cases: list[Case]) -> None:
    """How long costs take to be measured, and how much of that is spent before the first task is timed."""
    torch.backends.cudnn.benchmark = False
    for case in cases:
        model = case.model().train()
        optimizer = make_optimizer(case.optimizer, model, fused=True)
        began, traced = time.perf_counter(), 0.0

        def progress(_: str, done: float, began: float = began) -> None:
            nonlocal traced
            if done > 0 and not traced:
                traced = time.perf_counter() - began

        costs = measure_costs(model, loss_of, optimizer, case.batches(1)[0], progress=progress)
        row = {
            "case": case.name, "layers": len(costs.layers), "seconds": f"{time.perf_counter() - began:.2f}",
            "seconds_to_first_task": f"{traced:.2f}", **environment(DEVICE),
        }  # fmt: skip
        print(row, flush=True)
        append(arguments.results, [row])


def measure_costs_first(cases: list[Case]) -> None:
    """Each in a process of its own; they take turns."""
    for child in [Child(__file__, case.name, "costs", **child_environment()) for case in cases]:
        try:
            child.answer()
        except ChildFailedError as error:
            print(error, flush=True)
        child.close()


def measure_together(cases: list[Case], folder: Path) -> None:
    """Everything is made ready at once, then timed one at a time."""
    chosen = arguments.variants.split(",") if arguments.variants else None
    everyone = {
        case.name: {name: Child(__file__, case.name, name, **child_environment()) for name in chosen or case.variants}
        for case in cases
    }
    until = time.monotonic() + arguments.patience
    ready = {name: ready_ones(children, until) for name, children in everyone.items()}
    for case in cases:
        print(case.name, flush=True)
        children = everyone[case.name]
        if arguments.baseline in ready[case.name]:
            able = {name: child for name, child in children.items() if name in ready[case.name]}
            measure(case, able, ready[case.name], folder)
        for child in children.values():
            child.close()


def child_environment() -> dict[str, str]:
    return {"GRADWEAVE_BENCHMARK_COSTS": str(costs_folder())}


def costs_folder() -> Path:
    """SideStreamLane the results; a child is told by its environment."""
    import os

    told = os.environ.get("GRADWEAVE_BENCHMARK_COSTS")
    folder = Path(told) if told else arguments.results.with_suffix(".costs")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def draw(path: Path) -> None:
    """Bars of speed-up over ``split``, and a mark where the schedule had predicted it."""
    from matplotlib.figure import Figure

    rows = [row for row in read(path) if row["mode"] != BASELINE]
    colours = {"side_stream": "#ee7733", "joint": "#228833", "joint_bounded": "#66aa55", "cross_step": "#4477aa"}
    split_ms = {row["case"]: float(row["predicted_ms"]) for row in read(path) if row["mode"] == BASELINE}
    figure = Figure(figsize=(10, 0.24 * len(rows) + 1.4), dpi=130, layout="constrained")
    axes = figure.subplots()
    ticks: list[float] = []
    place, last = 0.0, ""
    for row in rows:
        place += 1.0 if row["case"] == last else 1.6
        last = row["case"]
        value, low, high = (float(row[key]) for key in ("speedup", "speedup_low", "speedup_high"))
        axes.barh(place, value - 1, height=0.8, left=1.0, color=colours.get(row["mode"], "#bbbbbb"))
        spread = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axes.errorbar(value, place, xerr=spread, color="black", linewidth=0.8, capsize=2)
        if row["predicted_ms"]:
            axes.plot(split_ms[row["case"]] / float(row["predicted_ms"]), place, "kD", markersize=4)
        ticks.append(place)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(ticks, labels=[f"{row['case']}  {row['mode']}" for row in rows], fontsize=7)
    axes.set_ylim(place + 1, 0.6)
    axes.set_xlabel(
        f"speed-up over the same layers split, on one stream (diamonds: predicted)\n95% interval; {rows[0]['device']}, "
        f"torch {rows[0]['torch']}"
    )
    figure.savefig(path.with_suffix(".png"))


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    if arguments.what == "draw":
        draw(arguments.results)
        return
    names = arguments.workload or list(WORKLOADS if DEVICE.type == "cuda" else TOYS)
    if arguments.what == "child":
        case, folder = CASES[names[0]], costs_folder()
        if arguments.variant == "costs":
            costs_of(case, folder)
            serve(lambda: lambda _: torch.zeros(()), case.batches)
        else:
            serve(lambda: make_variant(arguments.variant, case, folder), case.batches)
        return
    done = {row["case"] for row in read(arguments.results)}
    left = [CASES[name] for name in names if name not in done]
    if arguments.what == "costs":
        time_costs(left)
        return
    began, longest = time.monotonic(), 0.0
    measure_costs_first(left)
    print(f"costs are measured, after {time.monotonic() - began:.0f} s", flush=True)
    while left:
        part_began = time.monotonic()
        if part_began + longest - began > 60 * arguments.minutes:
            print("time is up; run again for the rest")
            return
        measure_together(left[: arguments.together], costs_folder())
        left = left[arguments.together :]
        longest = max(longest, time.monotonic() - part_began)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="User provided device_type of 'cuda'")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "costs", "draw", "child"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--workload", action="append", choices=tuple(CASES), help="once for each; all unless given")
    parser.add_argument("--variant", help="of a child")
    parser.add_argument("--variants", help="only these, with commas between them; the baseline must be one")
    parser.add_argument("--baseline", default=BASELINE, help="what all are compared with")
    parser.add_argument("--together", type=int, default=2, help="workloads whose variants are made ready at once")
    parser.add_argument("--patience", type=float, default=1e6, help="seconds in which a variant must be ready")
    parser.add_argument("--minutes", type=float, default=8.0, help="no workload is begun that would end later")
    arguments = parser.parse_args()
    main()
