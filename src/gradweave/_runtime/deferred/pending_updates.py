"""Updates that are decided and not done yet: applied, or waited for, at the first use of what they write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.dynamo import not_compiling
from gradweave._compat.eager import (
    in_function_transform,
    is_being_traced,
    no_torch_function,
    not_traced,
    other_function_modes,
    outside_function_transforms,
    set_version,
    version_of,
    without_dispatch_modes,
    without_new_function_modes,
)
from gradweave._runtime.buckets import Bucket, mark_written
from gradweave._runtime.deferred.late import settled
from gradweave._runtime.deferred.pending_gradient import PendingGradient, make_gradient_plain
from gradweave._runtime.deferred.pending_parameter import (
    PendingParameter,
    accumulate,
    accumulated,
    make_pending,
    restore,
    show,
    shown_gradient,
)
from gradweave._runtime.deferred.pending_state import PendingState
from gradweave._runtime.deferred.training_thread import TrainingThread
from gradweave._runtime.deferred.update import Update, await_late
from gradweave._runtime.optimizer_steps.partial import PartialStepper, no_autocast, step_of, with_default_type
from gradweave.errors import GradweaveError


class UpdateRules:
    """What a technique decides for its deferred updates; these are the defaults.

    Attributes:
        name: The technique, for messages.
    """

    name = "gradweave"

    def buckets(self, used: Sequence[nn.Parameter]) -> list[Bucket]:
        """Return the buckets, once a step in stock order has made the optimizer's state.

        Args:
            used: All parameters of the optimizer, and others, in the order in which a forward has used them; one may
                occur twice.
        """
        raise NotImplementedError

    def may_hold(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient stays what it is until the update, unless it is changed through Python."""
        raise NotImplementedError

    def stand_in(self, gradient: torch.Tensor, resolve: Callable[[], None]) -> torch.Tensor:
        """Return what ``.grad`` is while the update with it is pending; using that must call ``resolve`` first."""
        raise NotImplementedError

    def before_update(self, update: Update) -> None:
        """Wait for what an update reads."""

    def due(self, update: Update, pending: Sequence[Update]) -> Iterable[Update]:  # noqa: ARG002
        """Yield the updates to be made visible now, one of them being asked for; each is, before the next is taken.

        Args:
            update: The update that is asked for; must be yielded last.
            pending: All that are pending.
        """
        return (update,)

    def surroundings(self) -> AbstractContextManager[Any]:
        """Return a context for an update that runs at the first use of a parameter."""
        return nullcontext()


class PendingUpdates:
    """The updates that are pending, and the parameters, gradients and state that stand in meanwhile.

    On CUDA updates are launched on a second stream when they are handed over; the first use of one makes the stream
    that uses it wait for its event. On the CPU an update runs at its first use.

    Any thread may use a parameter: one at a time brings it up to date.

    Args:
        optimizer: The optimizer whose own code makes the updates.
        rules: What the technique decides.
        traced: Called after a parameter was resolved while the code that uses it is traced.

    Attributes:
        number_of: Number of each parameter's bucket, by the parameter's id.
        plain_state: Whether the optimizer's state has no tensors of a class of their own.
        in_graph: Whether a CUDA graph of several steps is being captured, in which updates may be pending.
    """

    def __init__(self, optimizer: Optimizer, rules: UpdateRules, traced: Callable[[], None]) -> None:
        self.optimizer = optimizer
        self.number_of: dict[int, int] = {}
        self.plain_state = False
        self.in_graph = False
        self._rules = rules
        self._traced = traced
        self._stepper = PartialStepper(optimizer)
        self._lock = RLock()
        self._training_thread = TrainingThread()
        self._process = os.getpid()
        self._pending: dict[int, Update] = {}
        self._state: Any = None
        self._function_modes = 0
        self._default_type = torch.get_default_dtype()
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._resolve_on_use = self.resolve  # one bound method for all parameters

    def __bool__(self) -> bool:
        return bool(self._pending)

    @property
    def runs_beside(self) -> bool:
        """Whether updates were launched on a second stream."""
        return bool(self._sides)

    def record(self, recorder: Callable[[int], AbstractContextManager[None]] | None) -> None:
        """Let a recorder see when each bucket is updated."""
        self._stepper.recorder = recorder

    def flush(self) -> None:
        """Applies everything that is pending, or waits for it."""
        if self._pending:
            with self._only_one():
                while self._pending and not any(update.is_running for update in self._pending.values()):
                    self._resolve(next(iter(self._pending.values())))

    def discard(self) -> None:
        """Forget what is pending: weights stay as they are, and the optimizer's state; gradients are gone."""
        for update in self._pending.values():
            for p in update.bucket.params:
                show(p, None)
                restore(p)
                p.grad = None
        self._pending.clear()
        if self._state is not None:
            self.optimizer.state, self._state = self._state, None

    def hand_over(self, updates: list[Update]) -> None:
        """Take updates over: parameters and gradients are pending from now on."""
        with self._only_one():
            self._hand_over(updates)

    def _hand_over(self, updates: list[Update]) -> None:
        self._training_thread.note()
        self._function_modes = other_function_modes()
        self._default_type = torch.get_default_dtype()
        self._launch(updates)
        # A graph from before the step must not be run backward with what it has kept of the weights.
        mark_written([p for update in updates for p in update.bucket.params])
        for update in updates:
            # Kept by the stand-ins alone: the update would be in a cycle with it, and its gradients live on after it.
            resolve = partial(self._resolve_update, update)
            for p, grad in zip(update.bucket.params, update.grads, strict=True):
                make_pending(p, self._resolve_on_use, self._show(update, grad, resolve))
            self._pending[update.bucket.number] = update
        self._state, self.optimizer.state = self.optimizer.state, PendingState(self._settle_state)

    def _show(self, update: Update, grad: torch.Tensor, resolve: Callable[[], None]) -> torch.Tensor:
        """Return what is seen of a gradient while the update with it is pending: using it, the update is done first."""
        shown = self._rules.stand_in(grad, resolve)
        update.shown.append(shown)
        return shown

    def _show_themselves(self, update: Update) -> list[torch.Tensor]:
        """Gradients are themselves again, also for those who have kept them; returns them."""
        themselves: list[torch.Tensor] = []
        for grad, shown in zip(update.grads, update.shown, strict=True):
            if type(shown) is PendingGradient:
                make_gradient_plain(shown)
                themselves.append(shown)
            else:
                themselves.append(settled(grad))
        update.shown = []
        return themselves

    def _launch(self, updates: list[Update]) -> None:
        """Starts the updates of CUDA parameters on the second stream, in the order of use.

        Those of the CPU are kept until their first use. Both see hyperparameters and a scaler's verdict as
        they are now: the main stream may write to those that are tensors while the second stream has yet to read them.
        """
        now = step_of(self.optimizer)
        if all(update.bucket.params[0].device.type == "cpu" for update in updates):
            for update in updates:
                update.frozen = now
            return
        frozen = now if now.has_tensors else None
        waited = set()
        for update in updates:
            device = update.bucket.params[0].device
            if device.type != "cuda":
                update.frozen = now
                continue
            update.frozen = frozen
            side = self._sides.get(device)
            if side is None:
                side = self._sides[device] = torch.cuda.Stream(device)
            current = torch.cuda.current_stream(device)
            if device not in waited:
                side.wait_stream(current)
                waited.add(device)
            with torch.cuda.stream(side):
                await_late(update)
                self._apply(update)
                update.event = side.record_event()
            update.stream = current

    def _apply(self, update: Update) -> None:
        self._rules.before_update(update)
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            no_autocast(update.bucket.params[0].device),
            without_dispatch_modes(),
            without_new_function_modes(self._function_modes),
            with_default_type(self._default_type),
            not_compiling(),
        ):
            self._stepper.step_bucket(update.bucket, update.frozen, self._state)
            mark_written(update.bucket.params)

    def _only_one(self) -> AbstractContextManager[Any]:
        """What lets one thread at a time bring parameters up to date.

        A forked process starts with the lock as it was, held perhaps by a thread that it does not have.
        """
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), RLock()
            self._training_thread.after_fork()
            for update in self._pending.values():
                update.is_running = False
        # The thread that has the lock waits for one that works in its place.
        return nullcontext() if self._training_thread.is_in_its_place else self._lock

    def resolve(self, p: nn.Parameter) -> None:
        """Bring a parameter up to date if its update is pending."""
        with self._only_one():
            update = self._pending.get(self.number_of.get(id(p), -1))
            if update is not None and type(p) is PendingParameter and not update.is_running:
                self._resolve(update)
                if is_being_traced():  # perhaps of a part of the model only, which is not entered
                    self._traced()

    def _resolve_update(self, update: Update) -> None:
        with self._only_one():
            if self._pending.get(update.bucket.number) is update and not update.is_running:
                self._resolve(update)

    def _settle_state(self) -> Any:
        """Applies everything that is pending; returns the optimizer's own state.

        An update that is under way may ask too: it gets the state as it is.
        """
        with self._only_one():
            if not any(update.is_running for update in self._pending.values()):
                self.flush()
            return self.optimizer.state if self._state is None else self._state

    def _resolve(self, update: Update) -> None:
        """Makes an update visible: runs it now, or makes the current stream wait for it."""
        if in_function_transform():
            with outside_function_transforms():
                return self._resolve(update)
        try:
            with not_traced():
                self._see_to(update)
        finally:
            if not self._pending and self._state is not None:
                state, self._state = self._state, None
                if type(self.optimizer.state) is PendingState:  # or the loop has put another one in its place
                    self.optimizer.state = state

    def _see_to(self, update: Update) -> None:
        if update.event is None:
            self._training_thread.run(partial(self._make_visible, update))
        else:  # which the streams of this thread are to wait for
            self._make_visible(update)

    def _make_visible(self, update: Update) -> None:
        for due in self._rules.due(update, list(self._pending.values())):
            with self._rules.surroundings():
                self._make_one_visible(due)

    def _make_one_visible(self, update: Update) -> None:
        params = update.bucket.params
        if update.event is not None:
            if capturing() and not self.in_graph:
                raise GradweaveError("a CUDA graph is being captured with updates pending: call fusion.flush() before")
            current = torch.cuda.current_stream(params[0].device)
            current.wait_event(update.event)
            if update.stream is not None and update.stream != current:
                update.stream.wait_event(update.event)
        for late in update.late:
            late.source.done(update.event)
        self._update_and_end(update, self._show_themselves(update))

    def _update_and_end(self, update: Update, grads: list[torch.Tensor]) -> None:
        """Updates, if that is yet to be done; then parameters and their ``.grad`` are as a stock step leaves them.

        An update that fails is still pending if nothing of it has been done, and else over: it is never done twice.
        """
        params = update.bucket.params
        cleared = [shown_gradient(p) is None for p in params]
        since = [accumulated(p) for p in params]
        for p, grad in zip(params, grads, strict=True):
            show(p, grad)
        if update.event is None:
            written = self._versions(params)
            update.is_running = True
            try:
                self._apply_to(update, grads)
            except BaseException:
                if self._versions(params) == written:
                    self._make_pending_again(update, grads, cleared, since)
                    raise
                self._end(update, cleared, since)
                raise
            finally:
                update.is_running = False
            # A graph that has kept a weight since the step, unread, has kept what the update makes of it.
            set_version(list(params), written[: len(params)])
        self._end(update, cleared, since)

    def _apply_to(self, update: Update, grads: list[torch.Tensor]) -> None:
        """Updates late, with the gradients back in place."""
        params = update.bucket.params
        if self.plain_state and params[0].device.type == "cpu":
            # Other threads are to find the parameters pending until they are updated.
            with no_torch_function():
                self._apply(update)
        else:  # what asks for the classes of parameters, or has tensors of a class of its own in its state
            for p, grad in zip(params, grads, strict=True):
                p.__class__ = nn.Parameter
                p.grad = grad
            self._apply(update)

    def _end(self, update: Update, cleared: list[bool], since: list[torch.Tensor | None]) -> None:
        """An update is over, and what happened to gradients while it was pending holds."""
        self._pending.pop(update.bucket.number, None)
        for p, is_cleared, added in zip(update.bucket.params, cleared, since, strict=True):
            if type(p) is nn.Parameter:
                left = p.grad
                make_pending(p, self._resolve_on_use, left)
                accumulate(p, added)
            if is_cleared:
                show(p, None)
            restore(p)

    def _make_pending_again(
        self, update: Update, grads: list[torch.Tensor], cleared: list[bool], since: list[torch.Tensor | None]
    ) -> None:
        update.grads = grads
        resolve = partial(self._resolve_update, update)
        for p, grad, is_cleared, added in zip(update.bucket.params, grads, cleared, since, strict=True):
            shown = self._show(update, grad, resolve)
            make_pending(p, self._resolve_on_use, None if is_cleared else shown)
            accumulate(p, added)

    def _versions(self, params: Iterable[nn.Parameter]) -> list[int]:
        """How often parameters and their state have been written: tells whether an update has begun."""
        with no_torch_function():
            written = [version_of(p) for p in params]
            of_all = self.optimizer.state if self._state is None else self._state
            states = [state for p in params if isinstance(state := of_all.get(p), dict)]
            for state in states:
                written += [version_of(value) for value in state.values() if isinstance(value, torch.Tensor)]
        return written


def capturing() -> bool:
    """Return whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
