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

from gradweave.compat import is_compiled
from gradweave.errors import GradweaveError
from gradweave.fusion.buckets import Bucket, make_buckets, same_objects
from gradweave.fusion.guard import GradientGuard
from gradweave.fusion.hooks import ModuleHook
from gradweave.fusion.norms import NormTracker
from gradweave.fusion.pending import pending_class
from gradweave.fusion.stepping import FrozenStep, PartialStepper, mark_written


@dataclass
class _Update:
    """An update that step() has decided and that is not in the weights yet."""

    bucket: Bucket
    frozen: FrozenStep
    grads: dict[nn.Parameter, torch.Tensor]
    event: torch.cuda.Event | None = None
    streams: list[torch.cuda.Stream] = field(default_factory=list)


class ForwardEngine:
    """Defers updates past step().

    On CUDA the updates are launched at step() on a second stream and run beside the next forward;
    the first use of a bucket makes its stream wait for the bucket's event. On the CPU a bucket is
    updated at its first use. The first step runs in stock order: it creates the optimizer's state
    and shows the order in which modules are used.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, norms: NormTracker, bucket_bytes: int | None = None
    ) -> None:
        self.optimizer = optimizer
        self.buckets: list[Bucket] = []
        self.accumulating = False
        self._model = model
        self._bucket_bytes = bucket_bytes
        self._norms = norms
        self._stepper = PartialStepper(optimizer)
        self._pending: dict[nn.Parameter, _Update] = {}
        self._shown: dict[nn.Parameter, GradientGuard] = {}
        self._pending_class = pending_class(self._shown, self._resolve_param)
        self._guards: dict[nn.Parameter, GradientGuard] = {}
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._handed_over: list[nn.Parameter] = []
        self._used: dict[nn.Parameter, None] = {}
        self._known: list[nn.Parameter] = []
        self._learning = self._learn_order()
        self._owners = list(self._guard_owners())
        self._flushing = [
            optimizer.register_state_dict_pre_hook(lambda _: self.flush()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.flush()),
        ]

    def detach(self) -> None:
        """Applies what is pending and takes every hook away."""
        self.flush()
        for hook in (*self._learning, *self._owners, *self._flushing):
            hook.remove()
        for p, guard in self._guards.items():
            if p.grad is guard:
                p.grad = None

    def flush(self) -> None:
        """Applies everything that is pending, or waits for it."""
        while self._pending:
            self._resolve(next(iter(self._pending.values())))

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

        def note(module: nn.Module) -> None:
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

    def _resolve_all(self, params: list[nn.Parameter], _: nn.Module) -> None:
        if self._pending:
            for p in params:
                self._resolve_param(p)

    # At step()

    def before_step(self) -> None:
        """Takes the gradients and the hyperparameters over; the optimizer's own update finds nothing to do."""
        self.flush()
        self._handed_over = []
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        with_grad = [p for p in params if p.grad is not None]
        if self._norms.enabled:
            self._norms.add(with_grad, [p.grad for p in with_grad])
            self._norms.end_step(params)
        if not same_objects(params, self._known) or _capturing():
            return
        frozen = FrozenStep(self.optimizer)
        updates = []
        for bucket in self.buckets:
            grads = {p: p.grad for p in bucket.params if p.grad is not None}
            if grads and all(type(p) is nn.Parameter and g.layout is torch.strided for p, g in grads.items()):
                updates.append(_Update(_restrict(bucket, grads), frozen, grads))
        for update in updates:
            for p in update.grads:
                p.grad = None
                self._pending[p] = update
            self._handed_over += update.grads
        self._launch(updates)
        for p in self._handed_over:
            p.__class__ = self._pending_class

    def after_step(self) -> None:
        """Closes the step; from here to the next backward, gradients may not be used."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not same_objects(params, self._known):
            self._learned(params)
        for p in self._handed_over:
            if p in self._pending:
                self._shown[p] = self._guards[p]
            else:
                p.grad = self._guards[p]

    def _learned(self, params: list[nn.Parameter]) -> None:
        """A step ran in stock order, so every parameter's state is there: buckets can be made."""
        for hook in self._learning:
            hook.remove()
        self._learning = []
        self._known = params
        self.buckets = make_buckets(self.optimizer, [*self._used, *params], self._bucket_bytes)
        for p in params:
            if p not in self._guards:
                self._guards[p] = GradientGuard(p, _refuse_use)

    # The updates themselves

    def _launch(self, updates: list[_Update]) -> None:
        """Starts the updates of CUDA parameters on the second stream, in the order of use."""
        waited = set()
        for update in updates:
            device = update.bucket.params[0].device
            if device.type != "cuda":
                continue
            side = self._sides.get(device)
            if side is None:
                side = self._sides[device] = torch.cuda.Stream(device)
            current = torch.cuda.current_stream(device)
            if device not in waited:
                side.wait_stream(current)
                waited.add(device)
            with torch.cuda.stream(side):
                self._apply(update)
                update.event = torch.cuda.Event()
                update.event.record(side)
            update.streams = [current]

    def _apply(self, update: _Update) -> None:
        kept = [(p, p.grad) for p in update.grads]
        try:
            for p, grad in update.grads.items():
                p.grad = grad
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                torch.autocast(update.bucket.params[0].device.type, enabled=False),
            ):
                self._stepper.step_bucket(update.bucket, update.frozen)
        finally:
            for p, before in kept:
                p.grad = before
        mark_written(update.grads)

    def _resolve_param(self, p: nn.Parameter) -> None:
        update = self._pending.get(p)
        if update is not None:
            self._resolve(update)

    def _resolve(self, update: _Update) -> None:
        """Makes an update visible: runs it now, or makes the current stream wait for it."""
        if update.event is not None and _capturing():
            raise GradweaveError("a CUDA graph is being captured while updates are pending: call fusion.flush() before")
        for p in update.grads:
            p.__class__ = nn.Parameter
        try:
            if update.event is None:
                self._apply(update)
            else:
                device = update.bucket.params[0].device
                for stream in {torch.cuda.current_stream(device), *update.streams}:
                    stream.wait_event(update.event)
        except BaseException:
            for p in update.grads:
                p.__class__ = self._pending_class
            raise
        for p in update.grads:
            del self._pending[p]
            guard = self._shown.pop(p, None)
            if guard is not None:
                p.grad = guard


def _restrict(bucket: Bucket, grads: dict[nn.Parameter, torch.Tensor]) -> Bucket:
    """The part of a bucket that has gradients."""
    if len(grads) == len(bucket.params):
        return bucket
    groups = {index: [p for p in params if p in grads] for index, params in bucket.groups.items()}
    return Bucket(bucket.number, tuple(grads), {index: params for index, params in groups.items() if params})


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
