"""Forward-fusion: step() hands the gradients over; each bucket is updated before its next use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.compat.eager import in_function_transform, is_compiled, outside_function_transforms
from gradweave.errors import GradweaveError
from gradweave.fusion.buckets import Bucket, make_buckets, same_groups
from gradweave.fusion.guard import GradientGuard, guard_gradient
from gradweave.fusion.hooks import HiddenParams
from gradweave.fusion.late import LateGradient, settle_gradients, settled
from gradweave.fusion.norms import NormTracker
from gradweave.fusion.pending import PendingState, pending_class, restore
from gradweave.fusion.stepping import (
    BegunStep,
    FrozenStep,
    PartialStepper,
    begins_whole,
    mark_written,
    no_autocast,
    step_of,
)
from gradweave.module_hook import ModuleHook

_MOST_BUCKETS = 3
"""On a GPU: the updates are launched one after the other anyway, and each launch costs the host."""


@dataclass
class _Update:
    """An update that step() has decided and that nobody has seen yet.

    Attributes:
        bucket: What it updates.
        grads: With what; kept until the update is visible.
        frozen: How, where it has not run yet, or numbers that it reads might change until it has.
        event: The end of it, where it runs on a second stream.
        stream: The stream that the gradients were made on.
        late: Those of the gradients that were not finished at step().
    """

    bucket: Bucket
    grads: list[torch.Tensor]
    frozen: FrozenStep | BegunStep | None = None
    event: torch.cuda.Event | None = None
    stream: torch.cuda.Stream | None = None
    late: list[LateGradient] = field(default_factory=list)


class ForwardEngine:
    """Defers updates past step().

    On CUDA the updates are launched at step() on a second stream and run beside the next forward;
    the first use of a bucket makes its stream wait for the bucket's event. On the CPU a bucket is
    updated at its first use. The first step runs in stock order: it creates the optimizer's state
    and shows the order in which modules are used.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, norms: NormTracker) -> None:
        self.optimizer = optimizer
        self.buckets: list[Bucket] = []
        self.accumulating = False
        self.in_graph = False
        self._model = model
        self._norms = norms
        self._stepper = PartialStepper(optimizer)
        self._hidden = HiddenParams(optimizer)
        self._pending: dict[int, _Update] = {}
        self._pending_class = pending_class(
            GradientGuard(torch.empty(0), _refuse_use, self._clear_pending), self._resolve_param
        )
        self._state: Any = None
        self._bucket_of: dict[int, int] = {}
        self._moved: dict[int, int] = {}
        self._guards: dict[int, GradientGuard] = {}
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._used: dict[nn.Parameter, None] = {}
        self._known: list[nn.Parameter] = []
        self._groups: list[list[nn.Parameter]] = []
        self._learning = self._learn_order()
        self._owners = list(self._guard_owners())
        self._flushing = [
            model.register_forward_pre_hook(ModuleHook(self._entered), prepend=True),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_state_dict),
        ]

    def detach(self, *, keep_guards: bool = False) -> None:
        """Applies what is pending and takes every hook away.

        Args:
            keep_guards: Leave used-up gradients guarded, for another engine to go on from there.
        """
        try:
            self.flush()
        finally:
            self._let_go(keep_guards)

    def _let_go(self, keep_guards: bool) -> None:
        for hook in (*self._learning, *self._owners, *self._flushing):
            hook.remove()
        self._hidden.restore()
        for p in self._known:
            if not keep_guards and type(p) is nn.Parameter and p.grad is self._guards[id(p)]:
                p.grad = None

    def flush(self) -> None:
        """Applies everything that is pending, or waits for it."""
        while self._pending:
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
        if not self._known:
            return "running the first step in stock order"
        where = (
            "on a second stream beside the next forward" if self._sides else "at their first use in the next forward"
        )
        return f"{len(self.buckets)} bucket(s) updated {where}"

    # What is used when

    def _learn_order(self) -> list[Any]:
        """Hooks that note the order in which modules with parameters run, until the first step."""

        def note(module: nn.Module, _: Any) -> None:
            self._used.update(dict.fromkeys(module.parameters(recurse=False)))

        owners = (m for m in self._model.modules() if next(m.parameters(recurse=False), None) is not None)
        return [module.register_forward_pre_hook(ModuleHook(note)) for module in owners if not is_compiled(module)]

    def _guard_owners(self) -> Iterable[Any]:
        """Hooks that bring up to date what might be read where a Parameter's class is not consulted.

        Compiled and scripted modules read all of theirs at once; a module from outside torch may
        hand its own parameters to a compiled extension.
        """
        for module in self._model.modules():
            whole = is_compiled(module)
            if whole or not type(module).__module__.startswith("torch.nn"):
                params = list(module.parameters(recurse=whole))
                if params:
                    resolve = ModuleHook(partial(self._resolve_all, params))
                    yield module.register_forward_pre_hook(resolve, prepend=True)

    def _resolve_all(self, params: list[nn.Parameter], *_: Any) -> None:
        if self._pending:
            for p in params:
                self._resolve_param(p)

    def _entered(self, _: nn.Module, args: Any) -> None:
        """The model is about to run: brings it up to date where its uses of parameters would go unnoticed.

        Function transforms unwrap parameters, and inputs of another tensor class may take a
        function over, before a Parameter's own class is asked.
        """
        if self._pending and (in_function_transform() or any(_of_odd_class(value) for value in args)):
            self.flush()

    # At step()

    def before_step(self, is_last: bool) -> None:
        """Takes the gradients and the hyperparameters over; the optimizer's own update finds nothing to do."""
        self.flush()
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self._norms.enabled:
            with_grad = [p for p in params if p.grad is not None]
            self._norms.add(with_grad, [p.grad for p in with_grad])
            self._norms.end_step(params)
        if not is_last or self._groups_changed() or (_capturing() and not self.in_graph):
            settle_gradients(params)
            return
        if begins_whole(self.optimizer):
            settle_gradients(params)
        updates = self._apart([update for bucket in self.buckets if (update := self._take(bucket)) is not None])
        if not updates or not self._may_launch(updates, params):
            settle_gradients(params)
            return
        self._launch(updates)
        count = 0
        for update in updates:
            for p in update.bucket.params:
                p.grad = None
                p.__class__ = self._pending_class
            self._pending[update.bucket.number] = update
            count += len(update.bucket.params)
        left = [p for p in params if type(p) is not self._pending_class] if count < len(params) else []
        settle_gradients(left)
        self._hidden.hide_all_but(left)

    def _may_launch(self, updates: list[_Update], params: list[nn.Parameter]) -> bool:
        """Whether these are all, where an optimizer takes a step with all gradients or none."""
        if not begins_whole(self.optimizer):
            return True
        return sum(len(update.grads) for update in updates) == sum(p.grad is not None for p in params)

    def _take(self, bucket: Bucket) -> _Update | None:
        """What step() is to do to a bucket; None if that must be done at once, or there is nothing."""
        grads = [p.grad for p in bucket.params]
        whole = True
        for p, grad in zip(bucket.params, grads, strict=True):
            if grad is None:
                whole = False
            elif type(grad) is GradientGuard:
                raise _refuse_use("step()")
            elif type(p) is not nn.Parameter or grad.layout is not torch.strided:
                return None
        if not whole:
            present = {p: grad for p, grad in zip(bucket.params, grads, strict=True) if grad is not None}
            if not present:
                return None
            bucket, grads = _restrict(bucket, present), list(present.values())
        return _Update(bucket, grads)  # type: ignore[arg-type]

    def _apart(self, updates: list[_Update]) -> list[_Update]:
        """Puts what has late gradients behind all the rest, in updates of its own, so that the rest need not wait."""
        self._bucket_of.update(self._moved)
        self._moved = {}
        if not any(type(grad) is LateGradient for update in updates for grad in update.grads):
            return updates
        parts: tuple[list[_Update], list[_Update]] = [], []
        for update in updates:
            of_param = dict(zip(update.bucket.params, update.grads, strict=True))
            for is_late, part in enumerate(parts):
                grads = {p: grad for p, grad in of_param.items() if (type(grad) is LateGradient) == bool(is_late)}
                if grads:
                    number = update.bucket.number + is_late * len(self.buckets)
                    part.append(_Update(_restrict(update.bucket, grads, number), list(grads.values())))
                    self._bucket_of.update(dict.fromkeys(map(id, grads), number))
                    if is_late:
                        self._moved.update(dict.fromkeys(map(id, grads), update.bucket.number))
        return [*parts[0], *parts[1]]

    def after_step(self) -> None:
        """Closes the step; from here to the next backward, gradients may not be used."""
        self._hidden.restore()
        if self._pending:
            self._state, self.optimizer.state = self.optimizer.state, PendingState(self._settle)
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
        self.buckets = make_buckets(self.optimizer, [*self._used, *params], _MOST_BUCKETS, "forward")
        self._bucket_of = {id(p): bucket.number for bucket in self.buckets for p in bucket.params}
        self._moved = {}
        for p in params:
            if id(p) not in self._guards:
                self._guards[id(p)] = guard_gradient(p, _refuse_use)

    # The updates themselves

    def _launch(self, updates: list[_Update]) -> None:
        """Starts the updates of CUDA parameters on the second stream, in the order of use.

        Those of the CPU are kept until their first use. Both see hyperparameters and a scaler's verdict as
        they are now: the main stream may write to those that are tensors while the second stream has yet to read them.
        """
        now = step_of(self.optimizer)
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
                _await_late(update)
                self._apply(update)
                update.event = side.record_event()
            update.stream = current

    def _apply(self, update: _Update) -> None:
        with torch.inference_mode(False), torch.no_grad(), no_autocast(update.bucket.params[0].device):
            self._stepper.step_bucket(update.bucket, update.frozen)
        mark_written(update.bucket.params)

    def _resolve_param(self, p: nn.Parameter) -> None:
        update = self._pending.get(self._bucket_of.get(id(p), -1))
        if update is not None and type(p) is self._pending_class:
            self._resolve(update)

    def _settle(self) -> Any:
        """Applies everything that is pending; returns the optimizer's own state."""
        self.flush()
        return self.optimizer.state

    def _before_state_dict(self, *_: Any) -> None:
        """Everything is to be seen as after step(), also what a step that failed has left hidden."""
        self.flush()
        self._hidden.restore()

    def _resolve(self, update: _Update) -> None:
        """Makes an update visible: runs it now, or makes the current stream wait for it."""
        if in_function_transform():
            with outside_function_transforms():
                return self._resolve(update)
        if self._state is not None:
            self.optimizer.state, self._state = self._state, None
        try:
            self._make_visible(update)
        finally:
            if self._pending:
                self._state, self.optimizer.state = self.optimizer.state, PendingState(self._settle)

    def _make_visible(self, update: _Update) -> None:
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
        restore(params, self._guards)
        if update.event is None:
            self._apply_late(update)
        del self._pending[update.bucket.number]

    def _apply_late(self, update: _Update) -> None:
        """Applies an update whose gradients are no longer in place; on failure it is still pending."""
        params = update.bucket.params
        kept = [p.grad for p in params]
        try:
            for p, grad in zip(params, update.grads, strict=True):
                p.grad = settled(grad)
            self._apply(update)
        except BaseException:
            for p, before in zip(params, kept, strict=True):
                p.grad = None
                p.__class__ = self._pending_class
                if type(before) is not GradientGuard:
                    p.grad = before
            raise
        for p, before in zip(params, kept, strict=True):
            p.grad = before

    def _clear_pending(self) -> None:
        """``zero_grad(set_to_none=False)`` has zeroed the guard that pending parameters show."""
        params = [p for update in self._pending.values() for p in update.bucket.params]
        self.flush()
        for p in params:
            if p.grad is self._guards[id(p)]:
                p.grad = torch.zeros_like(p)


def _await_late(update: _Update) -> None:
    """Lets the current stream, and no other, wait for gradients that are still being computed."""
    for position, (p, grad) in enumerate(zip(update.bucket.params, update.grads, strict=True)):
        if type(grad) is LateGradient:
            update.late.append(grad)
            p.grad = update.grads[position] = grad.source.ready()


def _restrict(bucket: Bucket, grads: dict[nn.Parameter, torch.Tensor], number: int | None = None) -> Bucket:
    """The part of a bucket that has the given gradients."""
    groups = {index: [p for p in params if p in grads] for index, params in bucket.groups.items()}
    number = bucket.number if number is None else number
    return Bucket(number, tuple(grads), {index: params for index, params in groups.items() if params})


def _of_odd_class(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, nn.Parameter)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _refuse_use(operation: str) -> GradweaveError:
    if operation.startswith(("add_", "add.")):
        return GradweaveError(
            "backward() after step() without zero_grad(): step() has handed the gradients over, so there is nothing to "
            "accumulate onto; call zero_grad() first"
        )
    return GradweaveError(
        f'{operation} on a .grad after step(): mode="forward" has handed it over; read gradients before step()'
    )
