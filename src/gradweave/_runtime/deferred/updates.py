"""Updates deferred past step(): each is done before the next use of its parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.dynamo import call_before_compiling, stop_calling_before_compiling
from gradweave._compat.eager import (
    flat_leaves,
    function_modes,
    in_function_transform,
    is_being_traced,
    is_compiled,
    is_device_mode,
    other_function_modes,
    watchers,
)
from gradweave._logging import announce
from gradweave._runtime.buckets import Bucket, same_groups
from gradweave._runtime.deferred.compiled_callees import weights_handed_out
from gradweave._runtime.deferred.late import LateGradient, settle_gradients
from gradweave._runtime.deferred.pending_updates import PendingUpdates, UpdateRules, capturing
from gradweave._runtime.deferred.unseen_readers import (
    COMPILED,
    TRACED,
    Ownership,
    outside_of_compiled,
    weights_looked_at,
    why_never,
)
from gradweave._runtime.deferred.update import Update, restrict
from gradweave._runtime.module_hook import ModuleHook
from gradweave._runtime.optimizer_steps.hooks import HiddenParams
from gradweave._runtime.optimizer_steps.partial import begins_whole, can_be_frozen


class DeferredUpdates:
    """Decides at step() which updates may be done later, and sees to it that they are.

    The first step runs in stock order: it creates the optimizer's state and shows the order in which
    modules are used.

    What could be read without a call to Python is never left pending: parameters and gradients whose
    memory something else refers to, or shared memory, are updated at step(). A model that turns out to
    be compiled or traced has all of its updates in stock order from then on.

    Args:
        model: The model that uses the parameters.
        optimizer: The optimizer that updates them; its step hooks call :meth:`open_step` and
            :meth:`decide`, and then :meth:`after_step`.
        rules: What the technique decides.

    Attributes:
        buckets: What is updated at once, once a step has been taken.
        stopped: Why all updates are in stock order, at step(); empty if they are not.
        pending: The updates that are pending.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, rules: UpdateRules) -> None:
        self.optimizer = optimizer
        self.buckets: list[Bucket] = []
        self.stopped = why_never(model)
        self.pending = PendingUpdates(optimizer, rules, partial(_stop_since_traced, ref(self)))
        self._rules = rules
        self._model = model
        self._hidden = HiddenParams(optimizer)
        self._decided: list[Update] = []
        self._moved: dict[int, int] = {}
        self._ownership = Ownership()
        own = begins_whole(optimizer)  # whose state is in parts of larger tensors, and whose code is known
        self._may_read_attributes = not own and not type(optimizer).__module__.startswith("torch.optim")
        self._state_is_its_own = own
        self._gradients_taken: set[int] = set()
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
        announce(f"{self._rules.name}: updates stay at step(), in stock order: {self.stopped}", level=logging.WARNING)

    def about_to_compile(self) -> None:
        """Something is about to be compiled, perhaps of the model, which must not see parameters pending.

        Once may be by the way, as for a loss. If it happens again, Dynamo has found parameters of another class than
        those that it compiled for, as it would in every step.
        """
        if self.pending:
            self._compiled_while_pending += 1
            self.flush()
            if self._compiled_while_pending > 1:
                self.stop(COMPILED)

    def flush(self) -> None:
        """Apply everything that is pending, or wait for it."""
        self.pending.flush()

    @property
    def has_learned(self) -> bool:
        """Whether a step has been taken, so that buckets are known."""
        return bool(self._known)

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
        if self.pending:
            for p in params:
                self.pending.resolve(p)

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
        elif self.pending and (in_function_transform() or _has_odd_class(args) or _has_odd_class(keywords.values())):
            self.flush()

    # At step()

    def open_step(self) -> list[nn.Parameter]:
        """Apply what is pending; return the optimizer's parameters, with the gradients of this step in ``.grad``."""
        self._hidden.restore()
        self._decided = []
        self.flush()
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def decide(self, params: list[nn.Parameter], *, is_last: bool) -> None:
        """Decide what is deferred; the optimizer's own update finds nothing to do for that.

        Args:
            params: What :meth:`open_step` has returned.
            is_last: Whether no other hook runs before the optimizer's own update.
        """
        if (
            self.stopped
            or not is_last
            or _autocasting(params)
            or _is_watched()
            or self._groups_changed()
            or (capturing() and not self.pending.in_graph)
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
        if type(p) is not nn.Parameter or grad is None or not self._rules.may_hold(grad):
            return False
        if grad.dtype is not p.dtype:  # of a graph from before the model was converted
            return False
        if id(grad) in self._gradients_taken:  # one gradient of two parameters, whose updates must find the same
            return False
        self._gradients_taken.add(id(grad))
        if self._may_read_attributes and p.__dict__:  # such as a rate of its own, which the loop may change
            return False
        return self._ownership.is_sole(p, {} if self._state_is_its_own else self.optimizer.state)

    def _apart(self, updates: list[Update]) -> list[Update]:
        """Puts what has late gradients behind all the rest, in updates of its own, so that the rest need not wait."""
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
                    part.append(Update(restrict(update.bucket, grads, number), list(grads.values())))
                    self.pending.number_of.update(dict.fromkeys(map(id, grads), number))
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
            self.pending.hand_over(updates)
            call_before_compiling(self._before_compiling)
        if self._groups_changed():
            self._learned([p for group in self.optimizer.param_groups for p in group["params"]])

    def _groups_changed(self) -> bool:
        return not same_groups(self.optimizer, self._groups)

    def _learned(self, params: list[nn.Parameter]) -> None:
        """A step ran in stock order, so every parameter's state is there: buckets can be made."""
        for hook in self._learning:
            hook.remove()
        self._learning = []
        self._known = params
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
        """Everything is to be seen as after step(), also what a step that failed has left hidden."""
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
