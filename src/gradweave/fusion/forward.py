"""Forward-fusion: step() hands the gradients over; each bucket is updated before its next use."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import RLock
from typing import Any
from weakref import finalize, ref

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.dynamo import call_before_compiling, not_compiling, stop_calling_before_compiling
from gradweave._compat.eager import (
    flat_leaves,
    function_modes,
    in_function_transform,
    is_being_traced,
    is_compiled,
    is_device_mode,
    is_sole_user,
    no_torch_function,
    not_traced,
    other_function_modes,
    outside_function_transforms,
    set_version,
    version_of,
    watchers,
    without_dispatch_modes,
    without_new_function_modes,
)
from gradweave._logging import announce
from gradweave._runtime.buckets import Bucket, make_buckets, mark_written, same_groups
from gradweave._runtime.deferred.compiled_callees import weights_handed_out
from gradweave._runtime.deferred.late import LateGradient, settle_gradients, settled
from gradweave._runtime.deferred.pending_gradient import PendingGradient, make_gradient_pending, make_gradient_plain
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
from gradweave._runtime.deferred.unseen_readers import (
    COMPILED,
    TRACED,
    Ownership,
    outside_of_compiled,
    weights_looked_at,
    why_never,
)
from gradweave._runtime.deferred.update import Update, await_late, restrict
from gradweave._runtime.module_hook import ModuleHook
from gradweave._runtime.optimizer_steps.hooks import HiddenParams
from gradweave._runtime.optimizer_steps.partial import (
    PartialStepper,
    begins_whole,
    can_be_frozen,
    no_autocast,
    step_of,
    with_default_type,
)
from gradweave.errors import GradweaveError
from gradweave.fusion.grad_norm import NormTracker

_MOST_BUCKETS = 3
"""On a GPU: the updates are launched one after the other anyway, and each launch costs the host."""


class ForwardEngine:
    """Defers updates past step().

    On CUDA the updates are launched at step() on a second stream and run beside the next forward;
    the first use of a bucket makes its stream wait for the bucket's event. On the CPU a bucket is
    updated at its first use. The first step runs in stock order: it creates the optimizer's state
    and shows the order in which modules are used.

    Any thread may use a parameter: one at a time brings it up to date. What could be read without
    a word to Python is never left pending: parameters and gradients whose memory something else
    refers to, or shared memory, are updated at step(). A model that turns out to be compiled or
    traced has all of its updates in stock order from then on.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, norms: NormTracker) -> None:
        self.optimizer = optimizer
        self.buckets: list[Bucket] = []
        self.accumulating = False
        self.in_graph = False
        self.stopped = why_never(model)
        self._model = model
        self._norms = norms
        self._stepper = PartialStepper(optimizer)
        self._hidden = HiddenParams(optimizer)
        self._lock = RLock()
        self._training_thread = TrainingThread()
        self._process = os.getpid()
        self._decided: list[Update] = []
        self._pending: dict[int, Update] = {}
        self._resolve_on_use = self._resolve_param  # one bound method for all parameters
        self._state: Any = None
        self._bucket_of: dict[int, int] = {}
        self._moved: dict[int, int] = {}
        self._ownership = Ownership()
        own = begins_whole(optimizer)  # whose state is in parts of larger tensors, and whose code is known
        self._may_read_attributes = not own and not type(optimizer).__module__.startswith("torch.optim")
        self._state_is_its_own = own
        self._function_modes = 0
        self._default_type = torch.get_default_dtype()
        self._gradients_taken: set[int] = set()
        self._plain_state = False
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._used: dict[nn.Parameter, None] = {}
        self._known: list[nn.Parameter] = []
        self._groups: list[list[nn.Parameter]] = []
        self._learning: list[Any] = []
        self._on_modules: list[Any] = []
        self._on_optimizer: list[Any] = []
        self._compiled_while_pending = 0
        # Dynamo keeps its callbacks for good: this one does not keep the model alive.
        self._before_compiling = partial(_about_to_compile, ref(self))
        self._told = finalize(self, stop_calling_before_compiling, self._before_compiling)
        try:
            self._attach()
        except BaseException:
            self._let_go()
            raise

    def _attach(self) -> None:
        self._on_optimizer.append(self.optimizer.register_state_dict_pre_hook(self._before_state_dict))
        self._on_optimizer.append(self.optimizer.register_load_state_dict_pre_hook(self._before_state_dict))
        if self.stopped:
            self._announce_stop()
            return
        for module in outside_of_compiled(self._model):
            self._learn_order(module)
            self._guard_owner(module)
        entered = ModuleHook(self._entered)
        self._on_modules.append(self._model.register_forward_pre_hook(entered, prepend=True, with_kwargs=True))

    def detach(self) -> None:
        """Applies what is pending and takes every hook away."""
        try:
            self.flush()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        for hook in (*self._learning, *self._on_modules, *self._on_optimizer):
            hook.remove()
        self._told()
        self._hidden.restore()

    def stop(self, reason: str) -> None:
        """Has all updates at step() from now on, for something that would not see them pending."""
        if not self.stopped:
            self.flush()
            self.stopped = reason
            for hook in (*self._learning, *self._on_modules):
                hook.remove()
            self._announce_stop()

    def _announce_stop(self) -> None:
        announce(f"fuse: updates stay at step(), in stock order: {self.stopped}", level=logging.WARNING)

    def about_to_compile(self) -> None:
        """Something is about to be compiled, perhaps of the model, which must not see parameters pending.

        Once may be by the way, as for a loss. If it happens again, Dynamo has found parameters of another class than
        those that it compiled for, as it would in every step.
        """
        if self._pending:
            self._compiled_while_pending += 1
            self.flush()
            if self._compiled_while_pending > 1:
                self.stop(COMPILED)

    def flush(self) -> None:
        """Applies everything that is pending, or waits for it."""
        if self._pending:
            with self._only_one():
                while self._pending and not any(update.is_running for update in self._pending.values()):
                    self._resolve(next(iter(self._pending.values())))

    @property
    def is_pending(self) -> bool:
        """Whether updates are pending."""
        return bool(self._pending)

    def accept_partial(self) -> None:
        """Nothing is ever partly applied: a step is handed over whole."""

    def record(self, recorder: Callable[[int], AbstractContextManager[None]] | None) -> None:
        """Lets a recorder see when each bucket is updated."""
        self._stepper.recorder = recorder

    def describe(self) -> str:
        """What it does, for explain()."""
        if self.stopped:
            return f"updates at step(), since {self.stopped}"
        if not self._known:
            return "running the first step in stock order"
        where = (
            "on a second stream beside the next forward" if self._sides else "at their first use in the next forward"
        )
        return f"{len(self.buckets)} bucket(s) updated {where}"

    # What is used when

    def _learn_order(self, module: nn.Module) -> None:
        """Notes when a module with parameters runs, until the first step."""

        def note(module: nn.Module, _: Any) -> None:
            if torch.compiler.is_compiling():
                return
            self._used.update(dict.fromkeys(module.parameters(recurse=False)))

        if next(module.parameters(recurse=False), None) is not None and not is_compiled(module):
            self._learning.append(module.register_forward_pre_hook(ModuleHook(note)))

    def _guard_owner(self, module: nn.Module) -> None:
        """Brings up to date what might be read where a Parameter's class is not consulted.

        Compiled modules read all of theirs at once; a module from outside torch may hand its own
        parameters to a compiled extension, or those of torch's modules inside of it; some of torch's
        compute in another way for parameters of an unknown class.
        """
        whole = is_compiled(module)
        if whole or not type(module).__module__.startswith("torch.nn"):
            params = list(module.parameters(recurse=whole))
            if not whole:
                params += weights_handed_out(module)
        else:
            params = weights_looked_at(module)
        if params:
            resolve = ModuleHook(partial(self._resolve_all, params))
            self._on_modules.append(module.register_forward_pre_hook(resolve, prepend=True))

    def _resolve_all(self, params: list[nn.Parameter], *_: Any) -> None:
        if torch.compiler.is_compiling():  # Dynamo: nothing is pending then, and no hook is to be compiled
            return
        if self._pending:
            for p in params:
                self._resolve_param(p)

    def _entered(self, _: nn.Module, args: Any, keywords: Any) -> None:
        """The model is about to run: brings it up to date where its uses of parameters would go unnoticed.

        Function transforms unwrap parameters, and inputs of another tensor class may take a
        function over, before a Parameter's own class is asked. What torch.jit makes of the model
        reads weights from C++ ever after.
        """
        if torch.compiler.is_compiling():
            return
        if is_being_traced():
            self.stop(TRACED)
        elif self._pending and (in_function_transform() or _has_odd_class(args) or _has_odd_class(keywords.values())):
            self.flush()

    # At step()

    def check_stock_order(self, reason: str) -> None:
        """Any step may be one in stock order."""

    def before_step(self, is_last: bool) -> None:
        """Decides what is deferred; the optimizer's own update finds nothing to do for that."""
        self._hidden.restore()
        self._decided = []
        self.flush()
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self._norms.enabled:
            with_grad = [p for p in params if p.grad is not None]
            self._norms.add(with_grad, [p.grad for p in with_grad])
            self._norms.end_step(params)
        if (
            self.stopped
            or not is_last
            or _autocasting(params)
            or _is_watched()
            or self._groups_changed()
            or (_capturing() and not self.in_graph)
            or not (begins_whole(self.optimizer) or can_be_frozen(self.optimizer))
        ):
            settle_gradients(params)
            return
        if begins_whole(self.optimizer):
            settle_gradients(params)
        self._gradients_taken.clear()
        updates = self._apart([update for bucket in self.buckets if (update := self._take(bucket)) is not None])
        self._gradients_taken.clear()
        if not updates or not self._may_launch(updates, params):
            settle_gradients(params)
            return
        deferred = {id(p) for update in updates for p in update.bucket.params}
        left = [p for p in params if id(p) not in deferred] if len(deferred) < len(params) else []
        settle_gradients(left)
        self._hidden.hide_all_but(left)
        self._decided = updates

    def _may_launch(self, updates: list[Update], params: list[nn.Parameter]) -> bool:
        """Whether these are all, where an optimizer takes a step with all gradients or none."""
        if not begins_whole(self.optimizer):
            return True
        return sum(len(update.grads) for update in updates) == sum(p.grad is not None for p in params)

    def _take(self, bucket: Bucket) -> Update | None:
        """What of a bucket can be updated later; None if nothing of it."""
        grads = [p.grad for p in bucket.params]
        may_wait = [self._may_wait(p, grad) for p, grad in zip(bucket.params, grads, strict=True)]
        if not all(may_wait):
            present = {
                p: grad for p, grad, may in zip(bucket.params, grads, may_wait, strict=True) if grad is not None and may
            }
            if not present:
                return None
            bucket, grads = restrict(bucket, present), list(present.values())
        return Update(bucket, grads)  # type: ignore[arg-type]

    def _may_wait(self, p: nn.Parameter, grad: torch.Tensor | None) -> bool:
        """Whether nothing can use a parameter or its gradient without asking Python."""
        if type(p) is not nn.Parameter or not self._is_ours_to_hold(grad):
            return False
        if grad is None or grad.dtype is not p.dtype:  # of a graph from before the model was converted
            return False
        if id(grad) in self._gradients_taken:  # one gradient of two parameters, whose updates must find the same
            return False
        self._gradients_taken.add(id(grad))
        if self._may_read_attributes and p.__dict__:  # such as a rate of its own, which the loop may change
            return False
        return self._ownership.is_sole(p, {} if self._state_is_its_own else self.optimizer.state)

    def _is_ours_to_hold(self, grad: torch.Tensor | None) -> bool:
        """Whether a gradient stays what it is until the update, unless it is changed through Python."""
        if type(grad) is LateGradient:
            return grad.layout is torch.strided
        return type(grad) is torch.Tensor and grad.layout is torch.strided and is_sole_user(grad)

    def _apart(self, updates: list[Update]) -> list[Update]:
        """Puts what has late gradients behind all the rest, in updates of its own, so that the rest need not wait."""
        self._bucket_of.update(self._moved)
        self._moved = {}
        if not any(type(grad) is LateGradient for update in updates for grad in update.grads):
            return updates
        parts: tuple[list[Update], list[Update]] = [], []
        for update in updates:
            of_param = dict(zip(update.bucket.params, update.grads, strict=True))
            for is_late, part in enumerate(parts):
                grads = {p: grad for p, grad in of_param.items() if (type(grad) is LateGradient) == bool(is_late)}
                if grads:
                    number = update.bucket.number + is_late * len(self.buckets)
                    part.append(Update(restrict(update.bucket, grads, number), list(grads.values())))
                    self._bucket_of.update(dict.fromkeys(map(id, grads), number))
                    if is_late:
                        self._moved.update(dict.fromkeys(map(id, grads), update.bucket.number))
        return [*parts[0], *parts[1]]

    def after_step(self) -> None:
        """Closes the step: what was decided is pending from here on.

        Not before: an optimizer's own step may raise, and then nothing is to have happened.
        """
        self._hidden.restore()
        updates, self._decided = self._decided, []
        if updates:
            with self._only_one():
                self._hand_over(updates)
            call_before_compiling(self._before_compiling)
        if self._groups_changed():
            self._learned([p for group in self.optimizer.param_groups for p in group["params"]])

    def _hand_over(self, updates: list[Update]) -> None:
        self._training_thread.note()
        self._function_modes = other_function_modes()
        self._default_type = torch.get_default_dtype()
        self._launch(updates)
        # A graph from before the step must not be run backward with what it has kept of the weights.
        mark_written([p for update in updates for p in update.bucket.params])
        for update in updates:
            update.resolve = partial(self._resolve_update, update)
            for p, grad in zip(update.bucket.params, update.grads, strict=True):
                make_pending(p, self._resolve_on_use, self._show(update, p, grad))
            self._pending[update.bucket.number] = update
        self._state, self.optimizer.state = self.optimizer.state, PendingState(self._settle)

    def _show(self, update: Update, p: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        """What is seen of a gradient while the update with it is pending: using it, the update is done first."""
        shown = self._seen(update, p, grad)
        update.shown.append(shown)
        return shown

    def _seen(self, update: Update, p: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        if type(grad) is LateGradient:
            return LateGradient(grad, _UntilUpdated(self, p, grad))
        make_gradient_pending(grad, update.resolve)
        return grad

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

    def _groups_changed(self) -> bool:
        return not same_groups(self.optimizer, self._groups)

    def _learned(self, params: list[nn.Parameter]) -> None:
        """A step ran in stock order, so every parameter's state is there: buckets can be made."""
        for hook in self._learning:
            hook.remove()
        self._learning = []
        self._known = params
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self.buckets = make_buckets(self.optimizer, [*self._used, *params], _MOST_BUCKETS, "forward")
        self._bucket_of = {id(p): bucket.number for bucket in self.buckets for p in bucket.params}
        self._moved = {}
        self._ownership.forget()
        states = (state for state in self.optimizer.state.values() if isinstance(state, dict))
        values = [value for state in states for value in state.values()]
        self._plain_state = all(type(value) is torch.Tensor or not isinstance(value, torch.Tensor) for value in values)

    # The updates themselves

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

    def _resolve_param(self, p: nn.Parameter) -> None:
        with self._only_one():
            update = self._pending.get(self._bucket_of.get(id(p), -1))
            if update is not None and type(p) is PendingParameter and not update.is_running:
                self._resolve(update)
                if is_being_traced():  # perhaps of a part of the model only, which is not entered
                    self.stop(TRACED)

    def _resolve_update(self, update: Update) -> None:
        with self._only_one():
            if self._pending.get(update.bucket.number) is update and not update.is_running:
                self._resolve(update)

    def _settle(self) -> Any:
        """Applies everything that is pending; returns the optimizer's own state.

        An update that is under way may ask too: it gets the state as it is.
        """
        with self._only_one():
            if not any(update.is_running for update in self._pending.values()):
                self.flush()
            return self.optimizer.state if self._state is None else self._state

    def _before_state_dict(self, *_: Any) -> None:
        """Everything is to be seen as after step(), also what a step that failed has left hidden."""
        self.flush()
        self._hidden.restore()

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
        params = update.bucket.params
        if update.event is not None:
            if _capturing() and not self.in_graph:
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
        if self._plain_state and params[0].device.type == "cpu":
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
        for p, grad, is_cleared, added in zip(update.bucket.params, grads, cleared, since, strict=True):
            shown = self._show(update, p, grad)
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


class _UntilUpdated:
    """Where a late gradient comes from once step() has been called: the update is done before it is used."""

    stream = None

    def __init__(self, engine: ForwardEngine, p: nn.Parameter, grad: LateGradient) -> None:
        self._engine = engine
        self._p = p
        self._grad = grad

    def settle(self) -> torch.Tensor:
        """The gradient, once the update with it is done."""
        self._engine._resolve_param(self._p)
        result: torch.Tensor = settled(self._grad)
        return result

    ready = settle

    def done(self, after: torch.cuda.Event | None = None) -> None:
        """Nothing is left to do."""


def _about_to_compile(engine: ref[ForwardEngine], *_: Any) -> None:
    attached = engine()
    if attached is not None:
        attached.about_to_compile()


def _has_odd_class(values: Iterable[Any]) -> bool:
    """Whether a tensor of a class of its own is among values, or in containers among them."""
    others = [value for value in values if type(value) is not torch.Tensor]
    return bool(others) and any(map(_of_odd_class, flat_leaves(others)))


def _of_odd_class(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter)


def _is_watched() -> bool:
    """Whether a step is inside of a mode that sees what it does, and might do something about it."""
    if watchers() == 0 and other_function_modes() == 0:
        return False
    return watchers() > 0 or not all(map(is_device_mode, function_modes()))


def _autocasting(params: list[nn.Parameter]) -> bool:
    """Whether a step is inside of autocast, which casts in some optimizers' arithmetic too."""
    return bool(params) and torch.is_autocast_enabled(params[0].device.type)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
