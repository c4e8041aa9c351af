"""Work that a step has left to the next one: updates that no look at a weight may miss."""

from __future__ import annotations

import logging
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import RLock
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.dynamo import call_before_compiling, not_compiling, stop_calling_before_compiling
from gradweave._compat.functions import (
    in_function_transform,
    not_traced,
    outside_function_transforms,
    without_dispatch_modes,
    without_new_function_modes,
)
from gradweave._logging import announce
from gradweave._runtime.buckets import mark_written
from gradweave._runtime.deferred.pending_parameter import PendingParameter, make_pending, restore
from gradweave._runtime.deferred.pending_state import PendingState
from gradweave._runtime.deferred.reader_guards import ReaderGuards
from gradweave._runtime.deferred.training_thread import TrainingThread
from gradweave._runtime.deferred.unseen_readers import Ownership, why_never_pending
from gradweave._runtime.optimizer_steps.partial import no_autocast
from gradweave._runtime.peers.replica_messages import naming_lost_peers
from gradweave.errors import UnsupportedError

_MOST_COMPILED = 1
"""Times that Dynamo may begin to compile while work is left; if it does again, it is something that reads weights in
every step, and would be compiled for pending ones each time."""


class Leaving(Protocol):
    """A step that can leave work to the next one."""

    @property
    def carries(self) -> bool:
        """Whether a run has left work."""

    def references(self) -> Counter[int]:
        """Return how often the step refers to each object between runs, by its id."""

    def flush(self) -> None:
        """Do the work that is left."""


class LeftWork:
    """What a step has left to the next one, and the stand-ins of the weights and the state that it will change.

    Between steps weights are pending: the first use of any of them, or of the optimizer's state, does all of the work
    that is left. During a step they are plain, and the step does it in the order of its schedule. Any thread may look
    at weights; one lock, which a step holds from its beginning to its end, keeps work from being done twice.

    Nothing stays left that others could see without asking: weights in shared memory, and weights and state that
    other objects refer to.

    Args:
        model: The model that uses the weights.
        optimizer: The optimizer that updates them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        refusal = why_never_pending(model)
        if refusal:
            raise UnsupportedError("a policy whose updates run in the next step", refusal, 'use policy="in_order"')
        self._optimizer = optimizer
        self._step: Leaving | None = None
        self._params: tuple[nn.Parameter, ...] = ()
        self._pending: tuple[nn.Parameter, ...] = ()
        self._state: Any = None
        self._lock = RLock()
        self._process = os.getpid()
        self._thread = TrainingThread()
        self._ownership = Ownership()
        self._compiled = 0
        self._resolve = partial(_flush_of, weakref.ref(self))  # parameters must not keep it, nor it the model
        self._before_compiling = partial(_about_to_compile, weakref.ref(self))
        self._hooks: list[Any] = []
        # Now, and not when there is work: Dynamo would capture the model again.
        self._guards = ReaderGuards(model, self._resolve, self._resolve, self._resolve)
        for register in (optimizer.register_state_dict_pre_hook, optimizer.register_load_state_dict_pre_hook):
            self._hooks.append(register(self._resolve))
        weakref.finalize(self, stop_calling_before_compiling, self._before_compiling)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context for a step: weights and state are plain inside, and pending behind it if work is left."""
        with self._only_one():
            self._make_plain()
            try:
                yield
            finally:
                self._make_pending()

    def hold(self, step: Leaving, params: Sequence[nn.Parameter]) -> None:
        """Take charge of what a step has left, until it or another one has run.

        Args:
            step: The step; it may have left nothing.
            params: The weights that the work will change, or needs as they are.
        """
        self._step, self._params = (step, tuple(params)) if step.carries else (None, ())

    def flush_unless_of(self, step: object) -> None:
        """Do what is left, unless this step is the one that has left it, and will do it in its own run."""
        if self._step is not step:
            self.flush()

    def flush(self) -> None:
        """Do what is left, wherever it is asked for: in transforms and traces, under autocast, in another thread."""
        if self._step is None:
            return
        if in_function_transform():
            with outside_function_transforms():
                self.flush()
            return
        with self._only_one(), not_traced():
            self._thread.run(self._flush)

    def about_to_compile(self) -> None:
        """Do what is left: what Dynamo is about to compile must not see pending weights."""
        if self._pending:
            self._compiled += 1
            self.flush()
            if self._compiled == _MOST_COMPILED + 1:
                announce(
                    "compile: other compiled code reads the weights between steps, and would be compiled again each "
                    "time; from here on a step leaves no updates to the next one",
                    level=logging.WARNING,
                )

    def detach(self) -> None:
        """Do what is left, and remove every hook."""
        self.flush()
        self._guards.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _only_one(self) -> AbstractContextManager[Any]:
        """Return the lock, unless this thread runs for one that has it; a forked process gets a new one."""
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), RLock()
            self._thread.after_fork()
        return nullcontext() if self._thread.is_substitute else self._lock

    def _make_pending(self) -> None:
        if self._step is None or self._pending:
            return
        if self._compiled > _MOST_COMPILED or not self._is_hidden(self._step):
            self.flush()
            return
        self._thread.note()
        # A backward of a graph from before the step must raise, as it would after a stock step.
        mark_written(self._params)
        self._pending = self._params  # first: an interrupt in between must find all that have changed
        for p in self._params:
            make_pending(p, self._resolve, None)
        self._state, self._optimizer.state = self._optimizer.state, PendingState(self._settle_state)
        call_before_compiling(self._before_compiling)

    def _is_hidden(self, step: Leaving) -> bool:
        """Return whether no other object can see the memory of weights and state without asking them."""
        known, state = step.references(), self._optimizer.state
        return all(type(p) is nn.Parameter and self._ownership.is_sole(p, state, known) for p in self._params)

    def _make_plain(self) -> None:
        for p in self._pending:
            if type(p) is PendingParameter:
                restore(p)
        self._pending = ()
        if self._state is not None:
            state, self._state = self._state, None
            if type(self._optimizer.state) is PendingState:  # not if the loop has assigned another state
                self._optimizer.state = state

    def _flush(self) -> None:
        step = self._step
        if step is None:
            return
        was_pending = bool(self._pending)
        self._make_plain()
        try:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                no_autocast(self._params[0].device),
                without_dispatch_modes(),
                without_new_function_modes(0),
                not_compiling(),
                naming_lost_peers("the updates that a step has left could not be done"),
            ):
                step.flush()
        finally:
            if not step.carries:
                self._step, self._params = None, ()
            elif was_pending:
                self._make_pending()  # an error has kept some of it from being done: the next look tries again

    def _settle_state(self) -> Any:
        self.flush()
        return self._optimizer.state


def _flush_of(work: weakref.ref[LeftWork], *_: Any) -> None:
    held = work()
    if held is not None:
        held.flush()


def _about_to_compile(work: weakref.ref[LeftWork], *_: Any) -> None:
    held = work()
    if held is not None:
        held.about_to_compile()
