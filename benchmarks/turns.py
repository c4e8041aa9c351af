"""Variants of a training step in processes of their own, which take turns.

A benchmark script calls :func:`serve` in its children, which it starts as :class:`Child`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradweave.compare.statistics import Ratio, paired_ratio, percentiles

ROUNDS, STEPS = 9, 20
CHECKED_STEPS = 10
AGAIN = " (again)"


class ChildFailedError(Exception):
    """A variant could not be made ready, or its process ended."""


class ChildLateError(ChildFailedError):
    """A variant did not answer in time."""


class Child:
    """A process that takes the steps of one variant."""

    def __init__(self, script: str, workload: str, variant: str, **environment: str) -> None:
        self.workload, self.variant = workload, variant
        command = [sys.executable, script, "child", "--workload", workload, "--variant", variant]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def answer(self, patience: float | None = None) -> dict[str, Any]:
        """What it says next; one that says nothing for some seconds is ended."""
        if patience is not None and not select.select([self._process.stdout], [], [], patience)[0]:
            self.kill()
            raise ChildLateError(f"{self.workload} {self.variant} did not answer within {patience:.0f} s")
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            self._log.seek(0)
            raise ChildFailedError(f"{self.workload} {self.variant} failed:\n{self._log.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def has_answer(self) -> bool:
        """Whether :meth:`answer` would return, or raise, at once."""
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def ask(self, steps: int = STEPS, *, patience: float | None = None) -> dict[str, Any]:
        """Has the child take a round of steps."""
        # A process that has ended is reported by answer(), with its log.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{steps}\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        return self.answer(patience)

    def close(self) -> None:
        """Let the process end by itself."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process and those that it has started, which compile for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def serve(make: Callable[[], Callable[[Any], Any]], batches: Callable[[], Sequence[Any]]) -> None:
    """In a child: makes a variant ready, says so, and takes as many steps as each line that comes in asks for.

    The seconds until it is ready begin behind what no variant can be blamed for: imports, CUDA's start and the data.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    on_gpu = torch.cuda.is_available()
    given = batches()
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    call = make()
    wait: Callable[[], Any] = getattr(call, "wait", torch.cuda.synchronize if on_gpu else lambda: None)
    losses, peaks = [], []
    for index in range(CHECKED_STEPS):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        losses.append(float(call(given[index % len(given)])))
        peaks.append(torch.cuda.max_memory_allocated() if on_gpu else 0)
    wait()
    seconds = time.perf_counter() - began
    if on_gpu:
        torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved() if on_gpu else 0
    reserved = reserved_by(lambda index: call(given[index % len(given)])) if on_gpu else 0
    note: Callable[[], str] = getattr(call, "note", lambda: "")
    ready = {"losses": losses, "seconds": seconds, "peaks": peaks, "kept": kept, "reserved": reserved, "note": note()}
    print(json.dumps(ready), file=answers)
    for line in sys.stdin:
        steps = int(line)
        wait()
        began = time.perf_counter()
        for index in range(steps):
            call(given[index % len(given)])
        wait()
        milliseconds = 1e3 * (time.perf_counter() - began) / steps
        print(json.dumps({"ms": milliseconds, "note": note()}), file=answers)


def reserved_by(step: Callable[[int], Any]) -> int:
    """Bytes that torch keeps for some steps, at most."""
    torch.cuda.reset_peak_memory_stats()
    for index in range(3):
        step(index)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved()


class Measured:
    """What rounds of turns gave of one variant.

    Attributes:
        ready: What it said when it was ready: ``losses``, ``seconds`` until then, ``peaks`` (bytes that torch had
            given out, of each of these steps), ``kept`` (bytes that torch keeps between steps), ``reserved`` (bytes
            that it keeps within them) and a ``note`` of the variant's.
    """

    def __init__(self, milliseconds: list[float], ready: dict[str, Any], baseline: list[float], losses: list[float]):
        self.low, self.middle, self.high = percentiles(milliseconds)
        self.ratio: Ratio = paired_ratio(baseline, milliseconds)
        self.ready = ready
        apart = [abs(a - b) / abs(a) for a, b in zip(losses, ready["losses"], strict=True)]
        self.off = max(apart) if all(value == value for value in apart) else math.nan


def take_turns(children: dict[str, Child], ready: dict[str, dict[str, Any]], baseline: str) -> dict[str, Measured]:
    """Has variants take turns, the baseline twice in each round."""
    order = [*children, baseline + AGAIN]
    times: dict[str, list[float]] = {name: [] for name in order}
    for child in children.values():
        child.ask()
    for number in range(ROUNDS):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            times[name].append(children[name.removesuffix(AGAIN)].ask()["ms"])
    return {
        name: Measured(times[name], ready[name.removesuffix(AGAIN)], times[baseline], ready[baseline]["losses"])
        for name in order
    }


def ready_ones(children: dict[str, Child], until: float | None = None) -> dict[str, dict[str, Any]]:
    """What each variant says once it is ready; one that fails, or takes longer, is left out, with a word about it.

    Args:
        children: By name.
        until: When they must be ready, by the monotonic clock; None for as long as they take.
    """
    ready = {}
    for name, child in children.items():
        try:
            ready[name] = child.answer(None if until is None else max(0.0, until - time.monotonic()))
        except ChildFailedError as error:
            print(error, flush=True)
    return ready
