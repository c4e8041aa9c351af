"""Choosing a mode: by what is allowed, then by measurement, with stock order to fall back on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.eager import is_being_traced
from gradweave._logging import announce
from gradweave._runtime import ab_trial
from gradweave._runtime.ab_trial import ABTrial, HostClock
from gradweave._runtime.deferred.unseen_readers import TRACED, why_never
from gradweave._runtime.module_hook import ModuleHook
from gradweave.fusion.backward import BackwardEngine
from gradweave.fusion.forward import ForwardEngine
from gradweave.fusion.grad_norm import NormTracker
from gradweave.fusion.loop_observer import LoopObserver

Choice = Literal["stock", "forward", "backward"]
_AS_GOOD = 0.99
"""Backward is preferred, since it saves memory, if it is slower than forward by no more than this."""


class AutoEngine:
    """Tries the modes that are allowed in turn, then keeps the fastest.

    Whatever is being tried, the result is the same bit for bit. By itself it does only what it can undo: stock order
    and forward, which defers updates but loses nothing. Backward changes weights before the loop can look at the
    gradients; with ``allow_backward`` a step in stock order is observed first, which may rule it out.

    Args:
        model: The model.
        optimizer: The optimizer.
        norms: Keeps gradient norms.
        allow_backward: Whether backward may be tried.
        never: Why stock order is all that the optimizer allows; empty if it allows more.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, norms: NormTracker, *, allow_backward: bool, never: str
    ) -> None:
        self.optimizer = optimizer
        self.chosen: Choice | None = None
        self._model = model
        self._norms = norms
        self._accumulating = False
        self._observer: LoopObserver | None = None
        self._reason = ""
        self._engine: BackwardEngine | ForwardEngine | None = None
        self._trial: ABTrial[Choice] | None = None
        self._on_model = model.register_forward_pre_hook(ModuleHook(self._entered), prepend=True)
        try:
            self._begin(never, allow_backward=allow_backward)
        except BaseException:
            self.detach()
            raise

    def _begin(self, never: str, *, allow_backward: bool) -> None:
        model, optimizer = self._model, self.optimizer
        never = never or why_never(model)
        if never:
            self._settle_for_stock(never)
        elif any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
            self._start_trials(["stock", "forward"], "DDP averages gradients after they arrive")
        elif allow_backward:
            self._observer = LoopObserver(optimizer)
        else:
            self._start_trials(["stock", "forward"], "backward only with allow_backward=True")

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
        self._on_model.remove()
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
            tried = self._trial.ways if self._trial is not None else ()
            return f"measuring {', '.join(tried)}; {self._reason}"
        timed = "".join(f"{name} {seconds * 1e3:.3f} ms, " for name, seconds in self._typical().items())
        if self._trial is not None and timed and self.chosen == "stock":
            gain = 1 - self._trial.rules.most
            timed += f"and another is kept only if it is {gain:.0%} faster, and faster in every round; "
        doing = self._engine.describe() if self._engine is not None else "updates at step()"
        return f"chose {self.chosen} ({timed}{self._reason}): {doing}"

    def _typical(self) -> dict[Choice, float]:
        """Return the median seconds of a step, by what was tried."""
        if self._trial is None:
            return {}
        return {way: median(own) for way, own in zip(self._trial.ways, self._trial.seconds(), strict=True) if own}

    def _use(self, name: Choice, *, keep_guards: bool = True) -> None:
        engine, self._engine = self._engine, None
        if isinstance(engine, BackwardEngine):
            engine.detach(keep_guards=keep_guards)
        elif engine is not None:
            engine.detach()
        if name == "backward":
            self._engine = BackwardEngine(self.optimizer, self._norms)
        elif name == "forward":
            self._engine = ForwardEngine(self._model, self.optimizer, self._norms)
        if self._engine is not None:
            self._engine.accumulating = self._accumulating

    def check_stock_order(self, reason: str) -> None:
        """A step is to be in stock order, which backward cannot do where it has been chosen, or is tried."""
        if isinstance(self._engine, BackwardEngine):
            self._engine.check_stock_order(reason)

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
        elif isinstance(self._engine, ForwardEngine) and self._engine.stopped:
            self._settle_for_stock(self._engine.stopped)
        elif self.chosen is None and self._trial is not None:
            self._advance(self._trial)

    def _end_observation(self, observer: LoopObserver) -> None:
        observer.detach()
        self._observer = None
        if observer.needs:
            self._start_trials(["stock", "forward"], f"the loop {' and '.join(observer.needs)}")
        else:
            self._start_trials(["stock", "forward", "backward"], "the loop leaves gradients alone")

    def _start_trials(self, candidates: Sequence[Choice], reason: str) -> None:
        self._reason = reason
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        device = next((p.device for p in params if p.is_cuda), torch.device("cpu"))
        self._trial = ABTrial(candidates, HostClock(device), rules=ab_trial.RULES)
        self._use(self._trial.current)

    def _settle_for_stock(self, reason: str) -> None:
        """Stock order from now on, unmeasured: said once."""
        self.chosen = "stock"
        self._reason = reason
        self._trial = None
        self._on_model.remove()
        self._use("stock", keep_guards=False)
        announce(f"fuse: updates stay at step(), in stock order: {reason}", level=logging.WARNING)

    def _entered(self, *_: Any) -> None:
        """What is made of a model while stock order is tried would not ask for weights later either."""
        if torch.compiler.is_compiling():
            return
        if is_being_traced() and self.chosen != "stock":
            self._settle_for_stock(TRACED)

    def _advance(self, trial: ABTrial[Choice]) -> None:
        """Note that a step of the trial is over, and go on to the next turn, or to the choice."""
        before = trial.turns_left
        trial.step_ended()
        if trial.is_over:
            self._choose(trial)
        elif trial.turns_left != before:
            self._use(trial.current)

    def _choose(self, trial: ABTrial[Choice]) -> None:
        typical, paying = self._typical(), trial.paying()
        self.chosen = paying[0] if paying else "stock"
        if "backward" in paying and typical["backward"] * _AS_GOOD <= typical[self.chosen]:
            self.chosen = "backward"
        self._use(self.chosen)
        if self.chosen == "stock":
            self._on_model.remove()
        announce(f"fuse: {self.describe()}")
