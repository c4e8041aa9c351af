"""Pending updates: run, or waited for, at the first use of what they write."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.dynamo import not_compiling
from gradweave._compat.functions import (
    in_function_transform,
    is_being_traced,
    no_torch_function,
    not_traced,
    other_function_modes,
    outside_function_transforms,
    without_dispatch_modes,
    without_new_function_modes,
)
from gradweave._compat.tensors import set_version, version_of
from gradweave._runtime.buckets import Bucket, mark_written
from gradweave._runtime.deferred.late import LateGradient, settled
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
from gradweave._runtime.optimizer_steps.partial import PartialStepper, no_autocast, with_default_type
from gradweave._runtime.optimizer_steps.snapshot import PreparedStep, StepSnapshot, capture_step
from gradweave.errors import GradweaveError


class Progress(Enum):
    """Progress of a pending update.

    An update is handed over as WAITING or, on CUDA, as LAUNCHED. Its first use turns WAITING into RUNNING. A LAUNCHED
    update, and a RUNNING one that is over, are no longer pending afterwards. A RUNNING one that fails before it has
    written anything is WAITING again.
    """

    WAITING = "not begun: runs at the first use of what it writes"
    LAUNCHED = "on a second stream: the first use waits for its event"
    RUNNING = "running at the first use, in one thread"


@dataclass
class Update:
    """An update that step() has decided and that is not visible yet.

    Attributes:
        bucket: The parameters.
        grads: Their gradients, kept until the update is visible.
        progress: Progress of the update.
        step: Settings captured at step(); None if the update has read them already, and they cannot change meanwhile.
        event: End of a launched update on its stream.
        stream: Stream that was current at step(), on which gradients were made and may be freed.
        late: Gradients that were not finished at step().
        shown: Values of ``.grad`` while the update is pending.
    """

    bucket: Bucket
    grads: list[torch.Tensor]
    progress: Progress = Progress.WAITING
    step: StepSnapshot | PreparedStep | None = None
    event: torch.cuda.Event | None = None
    stream: torch.cuda.Stream | None = None
    late: list[LateGradient] = field(default_factory=list)
    shown: list[torch.Tensor] = field(default_factory=list)


class UpdateRules(ABC):
    """Decisions of a technique about its deferred updates; those without a default are abstract.

    Attributes:
        name: Name of the technique, for messages.
        compile_remedy: How to train a compiled model instead, for a message.
    """

    name = "gradweave"
    compile_remedy = "detach() first"

    @abstractmethod
    def buckets(self, used: Sequence[nn.Parameter]) -> list[Bucket]:
        """Return the buckets, after a step in stock order has created the optimizer's state.

        Args:
            used: All parameters of the optimizer, and others, in the order in which a forward has used them; one may
                occur twice.
        """

    @abstractmethod
    def may_hold(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient can change before its update only through Python."""

    @abstractmethod
    def stand_in(self, gradient: torch.Tensor, resolve: Callable[[], None]) -> torch.Tensor:
        """Return the value of ``.grad`` while the update is pending; its use must call ``resolve`` first."""

    def before_update(self, update: Update) -> None:  # noqa: B027  (a default: most gradients are there)
        """Wait for the gradients of an update."""

    def due(self, update: Update, pending: Sequence[Update]) -> Iterable[Update]:  # noqa: ARG002
        """Yield the updates to make visible now; each is made visible before the next is taken.

        Args:
            update: The update that is needed now; must be yielded last.
            pending: All pending updates.
        """
        return (update,)

    def surroundings(self) -> AbstractContextManager[Any]:
        """Return a context for an update that runs at the first use of a parameter."""
        return nullcontext()


class PendingUpdates:
    """Pending updates, and the stand-ins for their parameters, gradients and optimizer state.

    On CUDA updates are launched on a second stream when they are handed over, and the first use makes its stream wait
    for the update's event. On the CPU an update runs at the first use. See :class:`Progress`.

    Any thread may use a parameter. One lock lets one thread at a time make updates visible; it is reentrant, since an
    update's own code uses parameters and state.

    Args:
        optimizer: The optimizer whose code runs the updates.
        rules: Decisions of the technique.
        traced: Called after a parameter was resolved in code that is being traced.

    Attributes:
        number_of: Number of each parameter's bucket, by the parameter's id.
        plain_state: Whether the optimizer's state has no tensors of subclasses.
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
        """Whether updates have been launched on a second stream."""
        return bool(self._sides)

    def record(self, recorder: Callable[[int], AbstractContextManager[None]] | None) -> None:
        """Let a recorder see when each bucket is updated."""
        self._stepper.recorder = recorder

    def flush(self) -> None:
        """Make every pending update visible; do nothing inside an update that is running."""
        if self._pending:
            with self._only_one():
                while self._pending and not self._is_running:
                    self._resolve(next(iter(self._pending.values())))

    @property
    def _is_running(self) -> bool:
        return any(update.progress is Progress.RUNNING for update in self._pending.values())

    def discard(self) -> None:
        """Drop pending updates with their gradients; weights and the optimizer's state stay as they are."""
        for update in self._pending.values():
            for p in update.bucket.params:
                show(p, None)
                restore(p)
                p.grad = None
        self._pending.clear()
        if self._state is not None:
            self.optimizer.state, self._state = self._state, None

    def hand_over(self, updates: list[Update]) -> None:
        """Make updates pending, with their parameters and gradients."""
        with self._only_one():
            self._hand_over(updates)

    def _hand_over(self, updates: list[Update]) -> None:
        self._training_thread.note()
        self._function_modes = other_function_modes()
        self._default_type = torch.get_default_dtype()
        self._launch(updates)
        # A backward of a graph from before the step must raise, as it would after a stock step: it needs old weights.
        mark_written([p for update in updates for p in update.bucket.params])
        for update in updates:
            # Only the stand-ins refer to it: as an attribute of the update it would form a cycle, which would keep the
            # gradients alive until garbage collection.
            resolve = partial(self._resolve_update, update)
            for p, grad in zip(update.bucket.params, update.grads, strict=True):
                make_pending(p, self._resolve_on_use, self._show(update, grad, resolve))
            self._pending[update.bucket.number] = update
        self._state, self.optimizer.state = self.optimizer.state, PendingState(self._settle_state)

    def _show(self, update: Update, grad: torch.Tensor, resolve: Callable[[], None]) -> torch.Tensor:
        """Return the value of ``.grad`` while an update is pending."""
        shown = self._rules.stand_in(grad, resolve)
        update.shown.append(shown)
        return shown

    def _plain_gradients(self, update: Update) -> list[torch.Tensor]:
        """Make an update's gradients plain again, for every reference to them, and return them."""
        plain: list[torch.Tensor] = []
        for grad, shown in zip(update.grads, update.shown, strict=True):
            if type(shown) is PendingGradient:
                make_gradient_plain(shown)
                plain.append(shown)
            else:
                plain.append(settled(grad))
        update.shown = []
        return plain

    def _launch(self, updates: list[Update]) -> None:
        """Launch the updates of CUDA parameters on the second stream, in the order of use.

        Those of CPU parameters wait for their first use. Both read hyperparameters and a scaler's verdict as they are
        now: of those that are tensors the second stream reads a copy, since the main stream may write to the originals
        before the second stream reads them.
        """
        step = capture_step(self.optimizer)
        if all(update.bucket.params[0].device.type == "cpu" for update in updates):
            for update in updates:
                update.step = step
            return
        step_if_needed = step if step.may_change else None
        waited = set()
        for update in updates:
            device = update.bucket.params[0].device
            if device.type != "cuda":
                update.step = step
                continue
            update.step = step_if_needed
            side = self._sides.get(device)
            if side is None:
                side = self._sides[device] = torch.cuda.Stream(device)
            current = torch.cuda.current_stream(device)
            if device not in waited:
                # Gradients, clipping and the captured settings are still being computed on the current stream.
                side.wait_stream(current)
                waited.add(device)
            with torch.cuda.stream(side):
                _await_late(update)
                self._apply(update)
                update.event = side.record_event()
            update.progress = Progress.LAUNCHED
            # Memory of gradients goes back to this stream's pool: it must wait for the event before they are freed.
            update.stream = current

    def _apply(self, update: Update) -> None:
        """Run an update as step() would have run it, whatever modes surround its first use."""
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
            self._stepper.step_bucket(update.bucket, update.step, self._state)
            mark_written(update.bucket.params)

    def _only_one(self) -> AbstractContextManager[Any]:
        """Return the lock under which updates become visible.

        A forked process inherits the lock as it was, perhaps held by a thread that it does not have: it gets a new one.
        """
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), RLock()
            self._training_thread.after_fork()
            for update in self._pending.values():
                if update.progress is Progress.RUNNING:
                    update.progress = Progress.WAITING
        # The thread that has the lock waits for its substitute, which must not wait for the lock.
        return nullcontext() if self._training_thread.is_substitute else self._lock

    def resolve(self, p: nn.Parameter) -> None:
        """Make a parameter's pending update visible, if it has one that is not running."""
        with self._only_one():
            update = self._pending.get(self.number_of.get(id(p), -1))
            if update is not None and type(p) is PendingParameter and update.progress is not Progress.RUNNING:
                self._resolve(update)
                if is_being_traced():  # of a part of the model, perhaps, so that the model's own hook did not run
                    self._traced()

    def _resolve_update(self, update: Update) -> None:
        with self._only_one():
            if self._pending.get(update.bucket.number) is update and update.progress is not Progress.RUNNING:
                self._resolve(update)

    def _settle_state(self) -> Any:
        """Make all pending updates visible, and return the optimizer's own state.

        An update that is running gets the state as it is.
        """
        with self._only_one():
            self.flush()
            return self.optimizer.state if self._state is None else self._state

    def _resolve(self, update: Update) -> None:
        """Make an update visible, outside of transforms and traces of the code that uses it."""
        if in_function_transform():
            with outside_function_transforms():
                return self._resolve(update)
        try:
            with not_traced():
                self._make_visible_in_its_thread(update)
        finally:
            if not self._pending and self._state is not None:
                state, self._state = self._state, None
                if type(self.optimizer.state) is PendingState:  # not if the loop has assigned another state
                    self.optimizer.state = state

    def _make_visible_in_its_thread(self, update: Update) -> None:
        if update.progress is Progress.LAUNCHED:
            self._make_visible(update)  # here: current streams are each thread's own, and this thread's must wait
        else:
            self._training_thread.run(partial(self._make_visible, update))

    def _make_visible(self, update: Update) -> None:
        for due in self._rules.due(update, list(self._pending.values())):
            with self._rules.surroundings():
                self._make_one_visible(due)

    def _make_one_visible(self, update: Update) -> None:
        """Wait for an update, or run it."""
        params = update.bucket.params
        if update.event is not None:
            # The update was launched outside of the capture, and a captured stream cannot wait for it.
            if capturing() and not self.in_graph:
                raise GradweaveError("a CUDA graph is being captured with updates pending: call fusion.flush() before")
            current = torch.cuda.current_stream(params[0].device)
            current.wait_event(update.event)
            if update.stream is not None and update.stream != current:
                update.stream.wait_event(update.event)
        for late in update.late:
            late.source.done(update.event)
        self._run_and_end(update, self._plain_gradients(update))

    def _run_and_end(self, update: Update, grads: list[torch.Tensor]) -> None:
        """Run an update that waits; then leave parameters and their ``.grad`` as a stock step does.

        An update that fails is pending again if it has written nothing, and over otherwise: no update runs twice.
        """
        params = update.bucket.params
        cleared = [shown_gradient(p) is None for p in params]
        since = [accumulated(p) for p in params]
        for p, grad in zip(params, grads, strict=True):
            show(p, grad)
        if update.progress is Progress.WAITING:
            versions = self._versions(params)
            update.progress = Progress.RUNNING
            try:
                self._apply_with(update, grads)
            except BaseException:
                if self._versions(params) == versions:
                    self._make_pending_again(update, grads, cleared, since)
                    raise
                self._end(update, cleared, since)
                raise
            finally:
                update.progress = Progress.WAITING
            # Versions were incremented when the update was handed over. A graph that has saved a weight since then,
            # without reading it, has saved the updated weight: the update itself must not count as another write.
            set_version(list(params), versions[: len(params)])
        self._end(update, cleared, since)

    def _apply_with(self, update: Update, grads: list[torch.Tensor]) -> None:
        """Run an update with its gradients in ``.grad``."""
        params = update.bucket.params
        if self.plain_state and params[0].device.type == "cpu":
            # Other threads must find the parameters pending until the update is done, so their class stays.
            with no_torch_function():
                self._apply(update)
        else:  # code of other devices may ask for the class, and tensor subclasses need __torch_function__
            for p, grad in zip(params, grads, strict=True):
                p.__class__ = nn.Parameter
                p.grad = grad
            self._apply(update)

    def _end(self, update: Update, cleared: list[bool], since: list[torch.Tensor | None]) -> None:
        """Restore an update's parameters, with what happened to their gradients while it was pending."""
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
        """Return the versions of parameters and their state, which tell whether an update has written any of them."""
        with no_torch_function():
            versions = [version_of(p) for p in params]
            own_state = self.optimizer.state if self._state is None else self._state
            states = [state for p in params if isinstance(state := own_state.get(p), dict)]
            for state in states:
                versions += [version_of(value) for value in state.values() if isinstance(value, torch.Tensor)]
        return versions


def _await_late(update: Update) -> None:
    """Make the current stream, and no other, wait for gradients that are still being computed."""
    for position, (p, grad) in enumerate(zip(update.bucket.params, update.grads, strict=True)):
        if type(grad) is LateGradient:
            update.late.append(grad)
            p.grad = update.grads[position] = grad.source.ready()


def capturing() -> bool:
    """Return whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
