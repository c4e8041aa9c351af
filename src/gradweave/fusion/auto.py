"""Choice of a fusion's mode, by what the loop allows and by measurement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.functions import is_being_traced
from gradweave._logging import announce
from gradweave._runtime import ab_trial
from gradweave._runtime.ab_trial import ABTrial, HostClock
from gradweave._runtime.deferred.unseen_readers import TRACED, why_never_pending
from gradweave._runtime.module_hook import ModuleHook
from gradweave.fusion.backward import BackwardEngine
from gradweave.fusion.forward import ForwardEngine
from gradweave.fusion.grad_norm import NormTracker
from gradweave.fusion.loop_observer import LoopObserver

Choice = Literal["stock", "forward", "backward"]
_BACKWARD_FACTOR = 0.99
"""Factor on its time in the comparison with the fastest: backward saves memory, and may be 1% slower."""


class State(Enum):
    """State of the choice.

    OBSERVING, where backward is allowed, becomes TRYING after one step. TRYING becomes CHOSEN after the last trial.
    Anything that rules out all but stock order turns every state into CHOSEN, at once if it is known from the
    beginning; a chosen forward becomes stock order in the same way.
    """

    OBSERVING = "a step in stock order, to find out whether the loop allows backward"
    TRYING = "modes take turns, and are timed"
    CHOSEN = "one mode is kept"


class AutoEngine:
    """Tries the modes that are allowed in turn, then keeps the fastest; see :class:`State`.

    The result is the same bit for bit in every mode. Without ``allow_backward`` only stock order and forward are tried:
    forward defers updates, but can be left at any time. Backward changes weights before the loop can look at the
    gradients, so one step in stock order is observed first, and may rule it out.

    Args:
        model: The model.
        optimizer: The optimizer.
        norms: Collects gradient norms.
        allow_backward: Whether backward may be tried.
        only_stock: Reason why the optimizer allows only stock order; empty if it allows more.

    Attributes:
        state: Current state.
        chosen: Mode that is kept; None until it is known.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, norms: NormTracker, *, allow_backward: bool, only_stock: str
    ) -> None:
        self.optimizer = optimizer
        self.state = State.TRYING
        self.chosen: Choice | None = None
        self._model = model
        self._norms = norms
        self._accumulating = False
        self._observer: LoopObserver | None = None
        self._reason = ""
        self._engine: BackwardEngine | ForwardEngine | None = None
        self._trial: ABTrial[Choice] | None = None
        self._model_hook = model.register_forward_pre_hook(ModuleHook(self._before_forward), prepend=True)
        try:
            self._begin(only_stock or why_never_pending(model), allow_backward=allow_backward)
        except BaseException:
            self.detach()
            raise

    def _begin(self, only_stock: str, *, allow_backward: bool) -> None:
        if only_stock:
            self._settle_for_stock(only_stock)
        elif any(isinstance(module, nn.parallel.DistributedDataParallel) for module in self._model.modules()):
            self._start_trials(["stock", "forward"], "DDP averages gradients after they arrive")
        elif allow_backward:
            self._observer = LoopObserver(self.optimizer)
            self.state = State.OBSERVING
        else:
            self._start_trials(["stock", "forward"], "backward only with allow_backward=True")

    @property
    def accumulating(self) -> bool:
        """Whether backwards only accumulate at the moment."""
        return self._accumulating

    @accumulating.setter
    def accumulating(self, value: bool) -> None:
        self._accumulating = value
        if self._observer is not None and value:
            self._observer.note("accumulates")
        if self._engine is not None:
            self._engine.accumulating = value

    def detach(self) -> None:
        """Detach the observer and the current engine."""
        self._model_hook.remove()
        self._stop_observing()
        self._use("stock", keep_guards=False)

    def flush(self) -> None:
        """Apply what is pending."""
        if self._engine is not None:
            self._engine.flush()

    def accept_partial(self) -> None:
        """Go on after a failed backward."""
        if self._engine is not None:
            self._engine.accept_partial()

    def record(self, recorder: Callable[[int], AbstractContextManager[None]] | None) -> None:
        """Run updates of the current engine inside the recorder's context; None: no longer."""
        if self._engine is not None:
            self._engine.record(recorder)

    def describe(self) -> str:
        """Return what was chosen, and why."""
        if self.state is State.OBSERVING:
            return "observing the first step"
        if self.state is State.TRYING:
            tried = self._trial.ways if self._trial is not None else ()
            return f"measuring {', '.join(tried)}; {self._reason}"
        timed = "".join(f"{name} {seconds * 1e3:.3f} ms, " for name, seconds in self._typical().items())
        if self._trial is not None and timed and self.chosen == "stock":
            gain = 1 - self._trial.rules.most
            timed += f"and another mode is kept only if it is {gain:.0%} faster, and faster in every round; "
        doing = self._engine.describe() if self._engine is not None else "updates at step()"
        return f"chose {self.chosen} ({timed}{self._reason}): {doing}"

    def _typical(self) -> dict[Choice, float]:
        """Return the median seconds of a step, by mode."""
        if self._trial is None:
            return {}
        return {way: median(own) for way, own in zip(self._trial.ways, self._trial.seconds(), strict=True) if own}

    def _use(self, name: Choice, *, keep_guards: bool = True) -> None:
        """Replace the current engine.

        Args:
            name: Mode of the new one.
            keep_guards: Whether gradients that backward has used up stay guarded until the loop clears them.
        """
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
        """Raise if backward is in use: it cannot take a step in stock order."""
        if isinstance(self._engine, BackwardEngine):
            self._engine.check_stock_order(reason)

    def before_step(self, is_last: bool) -> None:
        """Pass the call on to the observer or the current engine."""
        attached = self._observer or self._engine
        if attached is not None:
            attached.before_step(is_last)

    def after_step(self) -> None:
        """Pass the call on to the observer or the current engine, and go on to the next state or turn."""
        attached = self._observer or self._engine
        if attached is not None:
            attached.after_step()
        if self.state is State.OBSERVING and self._observer is not None:
            self._end_observation(self._observer)
        elif isinstance(self._engine, ForwardEngine) and self._engine.stop_reason:
            self._settle_for_stock(self._engine.stop_reason)
        elif self.state is State.TRYING and self._trial is not None:
            self._advance(self._trial)

    def _stop_observing(self) -> None:
        if self._observer is not None:
            self._observer.detach()
            self._observer = None

    def _end_observation(self, observer: LoopObserver) -> None:
        self._stop_observing()
        if observer.needs:
            self._start_trials(["stock", "forward"], f"the loop {' and '.join(observer.needs)}")
        else:
            self._start_trials(["stock", "forward", "backward"], "the loop leaves gradients alone")

    def _start_trials(self, candidates: Sequence[Choice], reason: str) -> None:
        self.state = State.TRYING
        self._reason = reason
        params = (p for group in self.optimizer.param_groups for p in group["params"])
        device = next((p.device for p in params if p.is_cuda), torch.device("cpu"))
        self._trial = ABTrial(candidates, HostClock(device), rules=ab_trial.RULES)
        self._use(self._trial.current)

    def _settle_for_stock(self, reason: str) -> None:
        """Keep stock order from now on, without measuring, and announce it once."""
        self._stop_observing()
        self.state = State.CHOSEN
        self.chosen = "stock"
        self._reason = reason
        self._trial = None
        self._model_hook.remove()
        self._use("stock", keep_guards=False)
        announce(f"fuse: updates stay at step(), in stock order: {reason}", level=logging.WARNING)

    def _before_forward(self, *_: Any) -> None:
        """Settle for stock order if the model is traced, in any mode: the traced copy would miss pending updates."""
        if torch.compiler.is_compiling():
            return
        if is_being_traced() and self.chosen != "stock":
            self._settle_for_stock(TRACED)

    def _advance(self, trial: ABTrial[Choice]) -> None:
        """Record a step of the trial, and go on to the next turn, or to the choice."""
        before = trial.turns_left
        trial.step_ended()
        if trial.is_over:
            self._choose(trial)
        elif trial.turns_left != before:
            self._use(trial.current)

    def _choose(self, trial: ABTrial[Choice]) -> None:
        typical, paying = self._typical(), trial.paying()
        self.state = State.CHOSEN
        self.chosen = paying[0] if paying else "stock"
        if "backward" in paying and typical["backward"] * _BACKWARD_FACTOR <= typical[self.chosen]:
            self.chosen = "backward"
        self._use(self.chosen)
        if self.chosen == "stock":
            self._model_hook.remove()
        announce(f"fuse: {self.describe()}")
