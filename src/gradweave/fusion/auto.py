"""Choosing a mode: by what the loop needs, then by measurement, with stock order to fall back on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.announce import announce
from gradweave.fusion.backward import BackwardEngine
from gradweave.fusion.forward import ForwardEngine
from gradweave.fusion.norms import NormTracker
from gradweave.fusion.observe import LoopObserver

WARM_UP_STEPS = 2
TIMED_STEPS = 4
ROUNDS = 3
WORTH_IT = 0.97
"""A mode must take at most this share of stock order's time to be kept, and less than it in every round: on a busy
machine one round of four steps says little."""
_AS_GOOD = 0.99
"""Backward is preferred, since it saves memory, if it is slower than forward by no more than this."""


class AutoEngine:
    """Observes a step, then tries the modes the loop allows in turn, then keeps the fastest.

    Whatever is being tried, the result is the same bit for bit.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, norms: NormTracker) -> None:
        self.optimizer = optimizer
        self.chosen: str | None = None
        self._model = model
        self._norms = norms
        self._accumulating = False
        self._observer: LoopObserver | None = None
        self._reason = ""
        self._engine: BackwardEngine | ForwardEngine | None = None
        self._times: dict[str, list[float]] = {}
        self._candidates: list[str] = []
        if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
            self._start_trials(["stock", "forward"], "DDP averages gradients after they arrive")
        else:
            self._observer = LoopObserver(optimizer)

    @property
    def accumulating(self) -> bool:
        """Whether backwards only accumulate now."""
        return self._accumulating

    @accumulating.setter
    def accumulating(self, value: bool) -> None:
        self._accumulating = value
        if self._observer is not None and value:
            self._observer.note("accumulates")
        if self._engine is not None:
            self._engine.accumulating = value

    def detach(self) -> None:
        """Lets go of whatever is attached."""
        if self._observer is not None:
            self._observer.detach()
        self._use("stock", keep_guards=False)

    def flush(self) -> None:
        """Applies what is pending."""
        if self._engine is not None:
            self._engine.flush()

    def accept_partial(self) -> None:
        """Goes on after a failed backward."""
        if self._engine is not None:
            self._engine.accept_partial()

    def record(self, recorder: Callable[[int], AbstractContextManager[None]] | None) -> None:
        """Lets a recorder see the updates of what is attached now."""
        if self._engine is not None:
            self._engine.record(recorder)

    def describe(self) -> str:
        """What was chosen, and why."""
        if self._observer is not None:
            return "observing the first step"
        if self.chosen is None:
            return f"measuring {', '.join(self._candidates)}; {self._reason}"
        timed = ", ".join(f"{name} {median(times) * 1e3:.3f} ms" for name, times in self._times.items())
        doing = self._engine.describe() if self._engine is not None else "updates at step()"
        return f"chose {self.chosen} ({timed} per step; {self._reason}): {doing}"

    def _use(self, name: str, *, keep_guards: bool = True) -> None:
        if self._engine is not None:
            self._engine.detach(keep_guards=keep_guards)
            self._engine = None
        if name == "backward":
            self._engine = BackwardEngine(self.optimizer, self._norms)
        elif name == "forward":
            self._engine = ForwardEngine(self._model, self.optimizer, self._norms)
        if self._engine is not None:
            self._engine.accumulating = self._accumulating

    def before_step(self, is_last: bool) -> None:
        """Passes on to what is attached now."""
        attached = self._observer or self._engine
        if attached is not None:
            attached.before_step(is_last)

    def after_step(self) -> None:
        """Passes on to what is attached now, and changes it when its time is over."""
        attached = self._observer or self._engine
        if attached is not None:
            attached.after_step()
        if self._observer is not None:
            self._end_observation(self._observer)
        elif self.chosen is None:
            self._advance()

    def _end_observation(self, observer: LoopObserver) -> None:
        observer.detach()
        self._observer = None
        if observer.needs:
            self._start_trials(["stock", "forward"], f"the loop {' and '.join(observer.needs)}")
        else:
            self._start_trials(["stock", "forward", "backward"], "the loop leaves gradients alone")

    def _start_trials(self, candidates: list[str], reason: str) -> None:
        self._candidates = candidates
        self._reason = reason
        self._times = {name: [] for name in candidates}
        self._schedule = candidates * ROUNDS
        self._step = 0
        self._use(self._schedule[0])

    def _advance(self) -> None:
        """One step of the current trial is over."""
        self._step += 1
        if self._step == WARM_UP_STEPS:
            self._began = self._now()
        elif self._step == WARM_UP_STEPS + TIMED_STEPS:
            seconds = (self._now() - self._began) / TIMED_STEPS
            self._times[self._schedule.pop(0)].append(seconds)
            self._step = 0
            if self._schedule:
                self._use(self._schedule[0])
            else:
                self._choose()

    def _now(self) -> float:
        if torch.cuda.is_available() and any(
            p.is_cuda for group in self.optimizer.param_groups for p in group["params"]
        ):
            torch.cuda.synchronize()
        return time.perf_counter()

    def _choose(self) -> None:
        typical = {name: median(times) for name, times in self._times.items()}
        fused = {name: seconds for name, seconds in typical.items() if name != "stock"}
        best = min(fused, key=fused.__getitem__)
        if "backward" in fused and fused["backward"] * _AS_GOOD <= fused[best]:
            best = "backward"
        always = all(a < b for a, b in zip(self._times[best], self._times["stock"], strict=True))
        self.chosen = best if always and fused[best] <= WORTH_IT * typical["stock"] else "stock"
        self._use(self.chosen)
        announce(f"fuse: {self.describe()}")
