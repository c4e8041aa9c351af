"""Updates deferred past step(): the decision which updates may run at the next use of their parameters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.dynamo import call_before_compiling, stop_calling_before_compiling
from gradweave._compat.functions import (
    dispatch_modes,
    function_modes,
    is_device_mode,
    other_function_modes,
)
from gradweave._compat.modules import is_compiled
from gradweave._logging import announce
from gradweave._runtime.buckets import Bucket, same_groups
from gradweave._runtime.deferred.late import LateGradient, settle_gradients
from gradweave._runtime.deferred.pending_updates import PendingUpdates, Update, UpdateRules, capturing
from gradweave._runtime.deferred.reader_guards import ReaderGuards
from gradweave._runtime.deferred.unseen_readers import (
    COMPILED,
    TRACED,
    Ownership,
    modules_outside_compiled,
    why_never_pending,
)
from gradweave._runtime.module_hook import ModuleHook
from gradweave._runtime.optimizer_steps.hooks import HiddenParams
from gradweave._runtime.optimizer_steps.snapshot import can_be_captured
from gradweave._runtime.two_phase_step import is_two_phase


class State(Enum):
    """State of deferred updates.

    LEARNING becomes DEFERRING at the end of the first step. DEFERRING stays so when the optimizer's groups change: one
    step in stock order, then new buckets. LEARNING and DEFERRING become STOPPED, for good, when a reader of weights is
    found that would not notice a pending update.
    """

    LEARNING = "the first step, in stock order: creates the optimizer's state and shows the order of use"
    DEFERRING = "each step decides which of its updates are deferred"
    STOPPED = "all updates stay at step(), in stock order"


class DeferredUpdates:
    """Decides at step() which updates run later, and makes them pending; see :class:`State`.

    Nothing is pending that could be read without a call from Python: parameters and gradients in shared memory, or
    whose memory other objects refer to, are updated at step().

    Args:
        model: The model that uses the parameters.
        optimizer: The optimizer that updates them; its step hooks call :meth:`open_step` and :meth:`decide`, and then
            :meth:`after_step`.
        rules: Decisions of the technique.

    Attributes:
        state: Current state.
        stop_reason: Reason for STOPPED; empty in other states.
        buckets: Parameters that one call updates; empty while LEARNING.
        pending: Pending updates.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, rules: UpdateRules) -> None:
        self.optimizer = optimizer
        self.buckets: list[Bucket] = []
        self.stop_reason = why_never_pending(model)
        self.state = State.STOPPED if self.stop_reason else State.LEARNING
        self.pending = PendingUpdates(optimizer, rules, partial(_stop_since_traced, ref(self)))
        self._rules = rules
        self._model = model
        self._hidden = HiddenParams(optimizer)
        self._decisions: list[Update] = []
        self._moved: dict[int, int] = {}
        self._ownership = Ownership()
        # The code of two-phase optimizers is known; their state is in parts of larger tensors, which are their own.
        self._owns_state = is_two_phase(optimizer)
        self._may_read_attributes = not self._owns_state and not type(optimizer).__module__.startswith("torch.optim")
        self._gradients_taken: set[int] = set()
        self._used: dict[nn.Parameter, None] = {}
        self._groups: list[list[nn.Parameter]] = []
        self._order_hooks: list[Any] = []
        self._guards: ReaderGuards | None = None
        self._optimizer_hooks: list[Any] = []
        self._compiled_while_pending = 0
        # Dynamo keeps its callbacks for good: this one must not keep the model alive.
        self._before_compiling = partial(_about_to_compile, ref(self))
        self._end_compile_callback = finalize(self, stop_calling_before_compiling, self._before_compiling)
        try:
            self._attach()
        except BaseException:
            self._remove_hooks()
            raise

    def _attach(self) -> None:
        self._optimizer_hooks.append(self.optimizer.register_state_dict_pre_hook(self._before_state_dict))
        self._optimizer_hooks.append(self.optimizer.register_load_state_dict_pre_hook(self._before_state_dict))
        if self.state is State.STOPPED:
            self._announce_stop()
            return
        for module in modules_outside_compiled(self._model):
            self._learn_order(module)
        self._guards = ReaderGuards(self._model, self._resolve_all, self.flush, self._traced_now)

    def detach(self) -> None:
        """Apply what is pending and remove every hook."""
        try:
            self.flush()
        finally:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in (*self._order_hooks, *self._optimizer_hooks):
            hook.remove()
        self._remove_guards()
        self._end_compile_callback()
        self._hidden.restore()

    def _remove_guards(self) -> None:
        if self._guards is not None:
            self._guards.remove()

    def stop(self, reason: str) -> None:
        """Keep all updates at step() from now on.

        Args:
            reason: A reader of weights that would not notice a pending update.
        """
        if self.state is not State.STOPPED:
            self.flush()
            self.state, self.stop_reason = State.STOPPED, reason
            for hook in self._order_hooks:
                hook.remove()
            self._remove_guards()
            self._announce_stop()

    def _announce_stop(self) -> None:
        announce(
            f"{self._rules.name}: updates stay at step(), in stock order: {self.stop_reason}", level=logging.WARNING
        )

    def about_to_compile(self) -> None:
        """Apply what is pending: what Dynamo is about to compile must not see pending parameters.

        Once may be unrelated to the model, such as a loss. If it happens again, Dynamo has found parameters of another
        class than those that it compiled for, and would recompile in every step: stop.
        """
        if self.pending:
            self._compiled_while_pending += 1
            self.flush()
            if self._compiled_while_pending > 1:
                self.stop(f"{COMPILED}; {self._rules.compile_remedy}")

    def flush(self) -> None:
        """Apply everything that is pending, or wait for it."""
        self.pending.flush()

    # During forward

    def _learn_order(self, module: nn.Module) -> None:
        """Record when a module with parameters runs, until the end of the first step."""

        def note(module: nn.Module, _: Any) -> None:
            if torch.compiler.is_compiling():
                return
            self._used.update(dict.fromkeys(module.parameters(recurse=False)))

        if next(module.parameters(recurse=False), None) is not None and not is_compiled(module):
            self._order_hooks.append(module.register_forward_pre_hook(ModuleHook(note)))

    def _resolve_all(self, params: Sequence[nn.Parameter]) -> None:
        if self.pending:
            for p in params:
                self.pending.resolve(p)

    def _traced_now(self) -> None:
        self.stop(TRACED)

    # At step()

    def open_step(self) -> list[nn.Parameter]:
        """Apply what is pending; return the optimizer's parameters, with the gradients of this step in ``.grad``."""
        self._hidden.restore()
        self._decisions = []
        self.flush()
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def decide(self, params: list[nn.Parameter], *, is_last: bool) -> None:
        """Decide which updates are deferred, and hide their parameters from the optimizer's own update.

        Args:
            params: Parameters that :meth:`open_step` has returned.
            is_last: Whether no other hook runs before the optimizer's own update.
        """
        if (
            self.state is not State.DEFERRING
            or not is_last
            or _autocasting(params)
            or _is_watched()
            or self._groups_changed()
            or (capturing() and not self.pending.in_graph)
            or not (is_two_phase(self.optimizer) or can_be_captured(self.optimizer))
        ):
            settle_gradients(params)
            return
        if is_two_phase(self.optimizer):
            settle_gradients(params)  # its first phase reads all gradients now
        self._gradients_taken.clear()
        updates = self._separate_late([update for bucket in self.buckets if (update := self._take(bucket)) is not None])
        self._gradients_taken.clear()
        if not updates or not self._may_launch(updates, params):
            settle_gradients(params)
            return
        deferred = {id(p) for update in updates for p in update.bucket.params}
        left = [p for p in params if id(p) not in deferred] if len(deferred) < len(params) else []
        settle_gradients(left)
        self._hidden.hide_all_but(left)
        self._decisions = updates

    def _may_launch(self, updates: list[Update], params: list[nn.Parameter]) -> bool:
        """Return whether updates can be deferred: of a two-phase step only all of them, since its commit is one."""
        if not is_two_phase(self.optimizer):
            return True
        return sum(len(update.grads) for update in updates) == sum(p.grad is not None for p in params)

    def _take(self, bucket: Bucket) -> Update | None:
        """Return the update of the part of a bucket that can be deferred; None if no part can."""
        grads = [p.grad for p in bucket.params]
        may_wait = [self._may_wait(p, grad) for p, grad in zip(bucket.params, grads, strict=True)]
        if not all(may_wait):
            present = {
                p: grad for p, grad, may in zip(bucket.params, grads, may_wait, strict=True) if grad is not None and may
            }
            if not present:
                return None
            bucket, grads = _restrict(bucket, present), list(present.values())
        return Update(bucket, grads)  # type: ignore[arg-type]

    def _may_wait(self, p: nn.Parameter, grad: torch.Tensor | None) -> bool:
        """Return whether nothing can use a parameter or its gradient without a call from Python."""
        if type(p) is not nn.Parameter or grad is None or not self._rules.may_hold(grad):
            return False
        if grad.dtype is not p.dtype:  # the model was converted between forward and step()
            return False
        if id(grad) in self._gradients_taken:  # two parameters share it, and both updates must read the same values
            return False
        self._gradients_taken.add(id(grad))
        if self._may_read_attributes and p.__dict__:  # such as the parameter's own rate, which the loop may change
            return False
        return self._ownership.is_sole(p, {} if self._owns_state else self.optimizer.state)

    def _separate_late(self, updates: list[Update]) -> list[Update]:
        """Move parameters with late gradients to updates of their own, after the others, which then need not wait."""
        self.pending.number_of.update(self._moved)
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
                    part.append(Update(_restrict(update.bucket, grads, number), list(grads.values())))
                    self.pending.number_of.update(dict.fromkeys(map(id, grads), number))
                    if is_late:
                        self._moved.update(dict.fromkeys(map(id, grads), update.bucket.number))
        return [*parts[0], *parts[1]]

    def after_step(self) -> None:
        """Close the step: make the updates that were decided pending.

        Not earlier: if the optimizer's own step raises, nothing must have happened.
        """
        self._hidden.restore()
        updates, self._decisions = self._decisions, []
        if updates:
            self.pending.hand_over(updates)
            call_before_compiling(self._before_compiling)
        if self.state is not State.STOPPED and self._groups_changed():
            self._make_buckets([p for group in self.optimizer.param_groups for p in group["params"]])

    def _groups_changed(self) -> bool:
        return not same_groups(self.optimizer, self._groups)

    def _make_buckets(self, params: list[nn.Parameter]) -> None:
        """Make buckets after a step in stock order, which has created the state of every parameter."""
        self.state = State.DEFERRING
        for hook in self._order_hooks:
            hook.remove()
        self._order_hooks = []
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self.buckets = self._rules.buckets([*self._used, *params])
        self.pending.number_of = {id(p): bucket.number for bucket in self.buckets for p in bucket.params}
        self._moved = {}
        self._ownership.forget()
        states = (state for state in self.optimizer.state.values() if isinstance(state, dict))
        values = [value for state in states for value in state.values()]
        self.pending.plain_state = all(
            type(value) is torch.Tensor or not isinstance(value, torch.Tensor) for value in values
        )

    def _before_state_dict(self, *_: Any) -> None:
        """Make all updates and parameters visible, also those that a failed step has left hidden."""
        self.flush()
        self._hidden.restore()


def _stop_since_traced(updates: ref[DeferredUpdates]) -> None:
    attached = updates()
    if attached is not None:
        attached.stop(TRACED)


def _about_to_compile(updates: ref[DeferredUpdates], *_: Any) -> None:
    attached = updates()
    if attached is not None:
        attached.about_to_compile()


def _is_watched() -> bool:
    """Return whether a mode around a step sees its operations, and might change them."""
    if dispatch_modes() == 0 and other_function_modes() == 0:
        return False
    return dispatch_modes() > 0 or not all(map(is_device_mode, function_modes()))


def _autocasting(params: list[nn.Parameter]) -> bool:
    """Return whether a step is inside autocast, which affects the arithmetic of some optimizers."""
    return bool(params) and torch.is_autocast_enabled(params[0].device.type)


def _restrict(bucket: Bucket, grads: dict[nn.Parameter, torch.Tensor], number: int | None = None) -> Bucket:
    """Return the part of a bucket that has the given gradients, under another number if one is given."""
    groups = {index: [p for p in params if p in grads] for index, params in bucket.groups.items()}
    number = bucket.number if number is None else number
    return Bucket(number, tuple(grads), {index: params for index, params in groups.items() if params})
