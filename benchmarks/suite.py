"""Our training steps on one GPU against the fastest of stock ones, over a suite of models.

    python benchmarks/suite.py cold --results build/suite-start.csv --minutes 9
    python benchmarks/suite.py time --results build/suite.csv --start build/suite-start.csv --minutes 9
    python benchmarks/suite.py time --results build/suite.csv --workload gpt2-2x1024

``cold`` starts every variant with empty caches, many side by side, and notes the seconds to its tenth step. ``time``
starts them again with the caches that this left, and measures: all variants of a model are ready in processes of their
own and take turns, a few steps at a time, one at a time. A short ranking of the stock variants comes first; the
best of them stay, the very best in two processes, and take turns with ours. What the results already hold is left out,
so that a table can be filled in several runs. ``--toys`` runs small models, also without a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from stock import LEARNING_RATES, Batch, Step, make_optimizer, make_stock
from suite_models import OURS, SUITE, TOYS, WORKLOADS, Workload
from tables import append, read
from turns import AGAIN, Child, ChildFailedError, ChildLateError, serve

import gradweave
from gradweave.compare.run import environment
from gradweave.compare.statistics import Ratio, paired_ratio, percentiles

SIDE_BY_SIDE, COMPILE_THREADS = 14, 3
GPU_GIB, PROCESSES = 135, 30
RANKING_ROUNDS, ROUNDS, FINALISTS = 3, 7, 3
PATIENCE = 150.0
COLD_PATIENCE = 420.0
"""Seconds for one cold start: a compiler that unrolls a loop over time may take hours."""
SAME_KERNELS = {"graph_compile": "compile", "graph_max_autotune": "compile_max_autotune"}
"""What compiles to the same kernels as another, and is not compiled cold beside it."""
SLOWEST_FIRST = ("whole_max_autotune", "compile_max_autotune", "graph_max_autotune", "gradweave.compile", "whole")
TUNING = "max_autotune"
SLOWEST_MODEL = "efficientnet-b0-64"
CAUSE = re.compile(r"\b[\w.]*(Error|Exception|Unsupported|Exit)\b")
MIB = 1 << 20


def use_fast_settings() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")


def make_variant(name: str, workload: Workload) -> Step:
    """Make a function that takes one training step."""
    model = workload.model()
    if name == "jax":
        from jax_gpt import train_with_jax

        return train_with_jax(model, lr=LEARNING_RATES["adamw"])
    if name not in OURS:
        return make_stock(name, model, workload.loss_fn, workload.optimizer)
    optimizer = make_optimizer(workload.optimizer, model)
    if name == "gradweave.compile":
        step = gradweave.compile(model, workload.loss_fn, optimizer)
        return with_note(lambda batch: step(*batch), lambda: step.eager_reason or "")
    fusion = gradweave.fuse(model, optimizer)

    def train(batch: Batch) -> Any:
        loss = workload.loss_fn(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return with_note(train, fusion.explain)


def with_note(step: Step, note: Callable[[], str]) -> Step:
    step.note = note  # type: ignore[attr-defined]
    return step


@dataclass
class Contender:
    """A variant of a workload, in a process of its own.

    Attributes:
        status: ``works``; ``eager`` where our compiled step runs without a graph; ``refused`` with an error of ours;
            ``failed`` with another; ``not ready`` in time.
        reason: Why it does not work, or what it has chosen.
        times: Milliseconds of a step, by round.
        ranking: The same, of the short rounds before.
    """

    workload: Workload
    variant: str
    child: Child | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    status: str = "not ready"
    reason: str = ""
    times: list[float] = field(default_factory=list)
    ranking: list[float] = field(default_factory=list)

    def start(self, caches: Path, *, threads: int) -> None:
        # Neither spaces nor parentheses: the C++ compiler is called with this path.
        variant = self.variant.removesuffix(AGAIN)
        name = f"{self.workload.name}-{SAME_KERNELS.get(variant, variant)}"
        self.child = Child(
            __file__,
            self.workload.name,
            variant,
            TORCHINDUCTOR_CACHE_DIR=str((caches / name).absolute()),
            TORCHINDUCTOR_COMPILE_THREADS=str(threads),
            OMP_NUM_THREADS="1",
        )

    def await_ready(self, patience: float) -> None:
        if self.child is None:
            return
        try:
            self.ready = self.child.answer(patience)
        except ChildFailedError as error:
            self.fail(error)
            return
        self.reason = self.ready["note"]
        is_eager = self.variant == "gradweave.compile" and self.reason
        self.status = "eager" if is_eager else "works"

    def fail(self, error: ChildFailedError) -> None:
        log = str(error)
        if isinstance(error, ChildLateError):
            self.status, self.reason = "not ready", log
        else:
            lines = [line for line in log.splitlines() if CAUSE.search(line) and not line.startswith(" ")]
            self.reason = lines[-1] if lines else log[-300:]
            self.status = "refused" if "gradweave.errors" in log else "failed"
        self.stop(kill=True)

    def take(self, steps: int, into: list[float]) -> None:
        if self.child is None:
            return
        try:
            answer = self.child.ask(steps, patience=PATIENCE)
        except ChildFailedError as error:
            self.fail(error)
            return
        into.append(answer["ms"])
        self.reason = answer["note"]

    def stop(self, *, kill: bool = False) -> None:
        if self.child is not None:
            self.child.kill() if kill else self.child.close()
            self.child = None

    @property
    def runs(self) -> bool:
        return self.child is not None


def stock_of(contenders: Sequence[Contender]) -> list[Contender]:
    """All that are not ours, the second processes among them."""
    return [one for one in contenders if one.variant.removesuffix(AGAIN) not in OURS]


def measure_cold(wanted: list[tuple[Workload, str]], results: Path, caches: Path, until: float) -> None:
    """Start variants with empty caches, as many side by side as memory and cores take."""

    def slowness(one: Contender) -> tuple[bool, bool, int, int]:
        order = SLOWEST_FIRST.index(one.variant) if one.variant in SLOWEST_FIRST else len(SLOWEST_FIRST)
        return (TUNING not in one.variant, one.workload.name != SLOWEST_MODEL, order, -one.workload.gib)

    began: dict[int, float] = {}
    waiting = sorted((Contender(workload, variant) for workload, variant in wanted), key=slowness)
    running: list[Contender] = []
    try:
        while (waiting or running) and time.monotonic() < until:
            late = [one for one in running if time.monotonic() - began[id(one)] > COLD_PATIENCE]
            for one in [one for one in running if one.child and (one.child.has_answer() or one in late)]:
                if one in late:
                    one.fail(ChildLateError(f"not ready after {COLD_PATIENCE:.0f} s"))
                else:
                    one.await_ready(PATIENCE)
                running.remove(one)
                one.stop()
                append(results, [start_row(one)])
                print(f"{one.workload.name:28s} {one.variant:26s} {one.status:10s} "
                      f"{one.ready.get('seconds', 0.0):6.1f} s  {short(one.reason)[:110]}", flush=True)  # fmt: skip
            taken = sum(one.workload.gib for one in running)
            for one in waiting[:]:
                if len(running) < SIDE_BY_SIDE and taken + one.workload.gib <= GPU_GIB:
                    one.start(caches, threads=COMPILE_THREADS)
                    began[id(one)] = time.monotonic()
                    waiting.remove(one)
                    running.append(one)
                    taken += one.workload.gib
            time.sleep(0.05)
    finally:
        for one in running:
            one.stop(kill=True)
    if waiting or running:
        print(f"time is up; run again for the other {len(waiting) + len(running)}", flush=True)


def start_row(one: Contender) -> dict[str, object]:
    return {
        "model": one.workload.name, "variant": one.variant, "status": one.status,
        "cold_s": f"{one.ready['seconds']:.1f}" if one.ready else "", "side_by_side": SIDE_BY_SIDE,
        "reason": short(one.reason), **environment(one.workload.device), "commit": os.environ.get("COMMIT", ""),
    }  # fmt: skip


def short(reason: str) -> str:
    """One line of a reason, without the paths of the machine."""
    line = " ".join(reason.split())
    return re.sub(r"(/[\w.@+-]+)+/", "", line)[:240]


def grouped(workloads: list[Workload], wanted: dict[str, list[str]]) -> Iterator[list[Workload]]:
    """Split workloads into groups whose processes fit beside one another."""
    group: list[Workload] = []
    gib = processes = 0
    for workload in workloads:
        count = len(wanted[workload.name]) + 1
        if group and (gib + count * workload.gib > GPU_GIB or processes + count > PROCESSES):
            yield group
            group, gib, processes = [], 0, 0
        group.append(workload)
        gib += count * workload.gib
        processes += count
    if group:
        yield group


def measure_times(
    workloads: list[Workload], wanted: dict[str, list[str]], results: Path, start: Path, caches: Path, until: float
) -> None:
    """Measure workloads group by group: the processes of a group start side by side, and are timed one at a time."""
    cold = {(row["model"], row["variant"]): row for row in read(start)}
    for group in grouped(workloads, wanted):
        if time.monotonic() > until:
            print("time is up; run again for the rest", flush=True)
            return
        everyone = {
            workload.name: [Contender(workload, variant) for variant in wanted[workload.name]] for workload in group
        }
        try:
            start_all([one for contenders in everyone.values() for one in contenders], caches)
            seconded = [again for workload in group if (again := rank(everyone[workload.name]))]
            start_all(seconded, caches)
            for workload in group:
                contenders = everyone[workload.name]
                finish(contenders, [one for one in seconded if one.workload is workload])
                append(results, rows_of(contenders, cold))
        finally:
            for contenders in everyone.values():
                for one in contenders:
                    one.stop(kill=True)


def start_all(contenders: list[Contender], caches: Path) -> None:
    for one in contenders:
        one.start(caches, threads=1)
    until = time.monotonic() + PATIENCE
    for one in contenders:
        one.await_ready(max(1.0, until - time.monotonic()))


def rank(contenders: list[Contender]) -> Contender | None:
    """Take short rounds, stop all stock variants behind the best, and name a second process of the very best."""
    for _ in range(RANKING_ROUNDS + 1):
        for one in contenders:
            one.take(max(2, one.workload.steps // 3), one.ranking)
    for one in contenders:
        one.ranking = one.ranking[1:]
    able = sorted((one for one in stock_of(contenders) if one.runs), key=lambda one: min(one.ranking))
    for one in able[FINALISTS:]:
        one.stop(kill=True)
    return Contender(able[0].workload, able[0].variant + AGAIN) if able else None


def finish(contenders: list[Contender], seconded: list[Contender]) -> None:
    contenders.extend(seconded)
    for number in range(-1, ROUNDS):
        running = [one for one in contenders if one.runs]
        cut = number % max(1, len(running))
        for one in running[cut:] + running[:cut]:
            one.take(one.workload.steps, one.times)
    for one in contenders:
        one.times = one.times[1:]
        one.stop(kill=True)


def rows_of(contenders: list[Contender], cold: dict[tuple[str, str], dict[str, str]]) -> list[dict[str, object]]:
    finalists = [one for one in stock_of(contenders) if len(one.times) == ROUNDS and AGAIN not in one.variant]
    best = min(finalists, key=lambda one: statistics.median(one.times), default=None)
    eager = next((one for one in contenders if one.variant == "eager" and one.ready), best)
    print(contenders[0].workload.name, "against", best.variant if best else "nothing", flush=True)
    return [row_of(one, best, eager, cold) for one in contenders]


def row_of(
    one: Contender, best: Contender | None, eager: Contender | None, cold: dict[tuple[str, str], dict[str, str]]
) -> dict[str, object]:
    variant = one.variant.removesuffix(AGAIN)
    is_finalist = len(one.times) == ROUNDS
    times = one.times if is_finalist else one.ranking
    against = (best.times if is_finalist else best.ranking) if best else []
    ratio = paired_ratio(against, times) if times and len(times) == len(against) else None
    low, middle, high = percentiles(times)
    ready = one.ready
    print(f"   {one.variant:32s} {one.status:9s} {middle:9.3f} ms  {ratio}  {short(one.reason)[:60]}", flush=True)
    return {
        "model": one.workload.name, "optimizer": one.workload.optimizer, "variant": one.variant,
        "kind": "ours" if variant in OURS else "stock", "status": one.status, "rounds": len(times),
        **{f"ms_{p}": f"{v:.4f}" if times else "" for p, v in (("20", low), ("50", middle), ("80", high))},
        "stock_best": best.variant if best else "", **ratio_columns(ratio),
        "peak_allocated_mib": f"{max(ready['peaks'][2:]) / MIB:.0f}" if ready and variant != "jax" else "",
        "peak_reserved_mib": f"{ready['reserved'] / MIB:.0f}" if ready and variant != "jax" else "",
        "cold_s": cold.get((one.workload.name, variant), {}).get("cold_s", ""),
        "warm_s": f"{ready['seconds']:.1f}" if ready else "",
        "largest_loss_difference": f"{loss_difference(one, eager):.2e}" if ready and eager else "",
        "losses_against": eager.variant if ready and eager else "",
        "reason": short(one.reason), **environment(one.workload.device), "commit": os.environ.get("COMMIT", ""),
    }  # fmt: skip


def ratio_columns(ratio: Ratio | None) -> dict[str, str]:
    names = ("ratio", "ratio_low", "ratio_high")
    values = (ratio.value, ratio.low, ratio.high) if ratio else ()
    return {name: f"{values[i]:.4f}" if ratio else "" for i, name in enumerate(names)}


def loss_difference(one: Contender, eager: Contender) -> float:
    """The largest relative difference of losses over the first steps; NaN if one of them is not finite."""
    pairs = list(zip(eager.ready["losses"], one.ready["losses"], strict=True))
    apart = [abs(a - b) / abs(a) for a, b in pairs]
    return max(apart) if all(value == value for value in apart) else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cold", "time", "child"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--start", type=Path, default=Path("build/suite-start.csv"), help="what cold has written")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="one of the suite; may be repeated")
    parser.add_argument("--variant", action="append", help="one of the variants, where a model has it; may be repeated")
    parser.add_argument("--toys", action="store_true", help="small models, on the CPU")
    parser.add_argument("--caches", type=Path, default=Path("build/suite-caches"))
    parser.add_argument("--minutes", type=float, default=600.0, help="begin nothing new after these")
    options = parser.parse_args()
    use_fast_settings()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process goes on when this one is ended
    if options.what == "child":
        workload = WORKLOADS[options.workload[0]]
        serve(lambda: make_variant(options.variant[0], workload), workload.batches)
        return
    if options.results is None:
        parser.error("--results: give the CSV to write")
    until = time.monotonic() + 60 * options.minutes
    chosen = options.workload or (TOYS if options.toys else SUITE)
    done = {(row["model"], row["variant"]) for row in read(options.results)}
    workloads = [WORKLOADS[name] for name in chosen]
    allowed = set(options.variant or (v for w in workloads for v in w.variants))
    wanted = {w.name: [v for v in w.variants if v in allowed and (w.name, v) not in done] for w in workloads}
    if options.what == "cold":
        pairs = [
            (w, v) for w in workloads for v in wanted[w.name] if SAME_KERNELS.get(v, "") not in wanted[w.name]
        ]  # fmt: skip
        measure_cold(pairs, options.results, options.caches, until)
    else:
        left = [w for w in workloads if not any(name == w.name for name, _ in done)]
        measure_times(left, wanted, options.results, options.start, options.caches, until)


if __name__ == "__main__":
    main()
