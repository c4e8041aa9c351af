"""Backward fusion: each bucket is updated, and its gradients freed, while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.autograd import gradient_hooks
from gradweave._compat.tensors import are_kept, version_of
from gradweave._runtime.backward import BackwardEnd
from gradweave._runtime.buckets import Bucket, make_buckets, mark_written, same_groups, same_objects
from gradweave._runtime.deferred.forbidden import ForbiddenGradient, forbidden_gradient
from gradweave._runtime.deferred.late import LateGradient, Source, settle_gradients
from gradweave._runtime.optimizer_steps.hooks import HiddenParams
from gradweave._runtime.optimizer_steps.partial import PartialStepper, no_autocast
from gradweave._runtime.optimizer_steps.snapshot import StepSnapshot
from gradweave.errors import GradweaveError
from gradweave.fusion.grad_norm import NormTracker
from gradweave.fusion.watched_step import REMEDY, WatchedStep, weight_changed

_MOST_BUCKETS = 24
"""Most buckets on a GPU: about one twenty-fourth of the gradients is alive at a time."""
_RECHECK_STEPS = 16
"""Steps between searches for parameters that were frozen, unfrozen or added; until then step() updates them."""


class State(Enum):
    """State of backward fusion.

    A step that has gradients turns WATCHING into READY. The first update of a step turns READY into UPDATED, and the
    end of the step turns UPDATED into READY again, as does ``accept_partial()`` after a backward that failed. READY and
    UPDATED become OUTDATED when the parameters turn out to differ from those of the watched step. The end of the step
    turns OUTDATED into WATCHING, and every sixteenth time READY too if parameters were frozen, unfrozen or added.
    """

    WATCHING = "a step in stock order, whose gradients are set aside"
    READY = "no bucket has been updated since the last step()"
    UPDATED = "a backward has updated buckets; step() is next"
    OUTDATED = "no further bucket is updated in backward until step()"


class BackwardEngine:
    """Updates buckets from inside backward; see :class:`State`.

    The first step runs in stock order while gradients are watched: a loop that reads or changes ``.grad`` between
    ``backward()`` and ``step()``, or that runs several backwards per step, is refused before any weight has changed.
    The step also shows the order in which gradients arrive. Then one hook per bucket, on the parameter whose gradient
    arrives last, updates the bucket. If not all its gradients are there (an unused parameter, another order), the
    bucket is left to ``step()``.

    Attributes:
        state: Current state.
        accumulating: Whether backwards only accumulate at the moment.
        buckets: Parameters that one call updates, in the order in which their gradients arrive.
    """

    def __init__(self, optimizer: Optimizer, norms: NormTracker) -> None:
        self.optimizer = optimizer
        self.accumulating = False
        self.buckets: list[Bucket] = []
        self.state = State.WATCHING
        self._norms = norms
        self._stepper = PartialStepper(optimizer)
        self._side_updates = _SideStreamUpdates()
        self._end = BackwardEnd(lambda _: self._side_updates.join())
        self._hidden = HiddenParams(optimizer)
        self._guards: dict[nn.Parameter, ForbiddenGradient] = {}
        self._watched = WatchedStep(self._fitting_guard)
        self._gradient_hooks: list[Any] = []
        self._own_hooks: dict[int, int] = {}
        self._state_hooks: list[Any] = []
        self._used_up: list[tuple[Sequence[nn.Parameter], list[ForbiddenGradient], list[int]]] = []
        self._applied: list[Bucket] = []
        self._settings: list[dict[str, Any]] = []
        self._optimizer_state: Any = None
        self._states = 0
        self._steps = 0
        try:
            self._state_hooks.append(optimizer.register_load_state_dict_post_hook(lambda _: self.accept_partial()))
            self._state_hooks.append(optimizer.register_state_dict_pre_hook(lambda _: self._hidden.restore()))
            self._watch()
        except BaseException:
            self.detach()
            raise

    def detach(self, *, keep_guards: bool = False) -> None:
        """Remove every hook, and leave in ``.grad`` what a stock step needs.

        Args:
            keep_guards: Leave the guards of gradients that are used up, for the next engine.
        """
        self._side_updates.join()
        self._hidden.restore()
        for hook in self._state_hooks:
            hook.remove()
        self._remove_gradient_hooks()
        self._watched.abandon()
        if not keep_guards:
            for p, guard in self._guards.items():
                if p.grad is guard:
                    p.grad = None

    def flush(self) -> None:
        """Do nothing: no update is ever pending, since all are done when backward is."""

    def accept_partial(self) -> None:
        """Go on from weights of which a failed backward has updated some."""
        self._side_updates.join()
        self._end.forget()
        self._forget_updates()

    def _forget_updates(self) -> None:
        if self.state is State.UPDATED:
            self.state = State.READY
        self._applied = []
        self._used_up = []
        self._settings = []

    def record(self, recorder: Callable[[int], AbstractContextManager[None]] | None) -> None:
        """Run each bucket's update inside the recorder's context; None: no longer."""
        self._stepper.recorder = recorder

    def describe(self) -> str:
        """Return what the engine does, for explain()."""
        if self.state is State.WATCHING:
            return "watching the first step, in stock order"
        return f"{len(self.buckets)} bucket(s) updated while backward goes on, gradients freed at once"

    # Watching

    def _watch(self) -> None:
        self._remove_gradient_hooks()
        self.state = State.WATCHING
        self._known = self._trainable()
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self._watched.begin(self._known)
        for p in self._known:
            self._fitting_guard(p)
            self._gradient_hooks.append(p.register_post_accumulate_grad_hook(self._set_aside))

    def _trainable(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _fitting_guard(self, p: nn.Parameter) -> ForbiddenGradient:
        """Return a parameter's guard, a new one if the model was converted."""
        if p not in self._guards or not _fits(self._guards[p], p):
            self._guards[p] = forbidden_gradient(p, self._refuse_use)
        return self._guards[p]

    def _set_aside(self, p: torch.Tensor) -> None:
        if self.accumulating or not isinstance(p, nn.Parameter) or p.grad is None:
            return
        _check_gradient(p.grad)
        self._watched.set_aside(p)

    def _refuse_use(self, operation: str) -> GradweaveError:
        self._hidden.restore()
        if operation.startswith(("add_", "add.")):
            return GradweaveError(
                'a second backward before step() and zero_grad(): mode="backward" updates weights in the first; run '
                "all but the last under fusion.no_update(), call zero_grad() after step(), or " + REMEDY
            )
        if self.state is State.WATCHING:
            return GradweaveError(
                f'{operation} on a .grad between backward() and step(): mode="backward" has used it up by then; '
                f"no weight has been changed; {REMEDY}"
            )
        return GradweaveError(
            f'{operation} on a .grad that is gone: mode="backward" frees gradients during backward(); {REMEDY}'
        )

    def _end_watching(self) -> None:
        """Make buckets in the order in which gradients have arrived, and hook their last parameters."""
        self._remove_gradient_hooks()
        self.buckets = make_buckets(self.optimizer, self._watched.gradients, _MOST_BUCKETS, "backward")
        self._watched.clear()
        self.state = State.READY
        for bucket in self.buckets:
            ready = partial(self._ready, bucket, [self._guards[p] for p in bucket.params])
            self._gradient_hooks.append(bucket.params[-1].register_post_accumulate_grad_hook(ready))
            self._own_hooks.update({id(p): int(p is bucket.params[-1]) for p in bucket.params})

    def _remove_gradient_hooks(self) -> None:
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks = []
        self._own_hooks = {}

    # During backward

    def takes_late(self, p: torch.Tensor) -> bool:
        """Return whether the next use of a gradient that arrives now is an update here, which can wait for it."""
        return not (self.accumulating or self.state is State.OUTDATED) and self._has_no_other_hook(p)

    def _has_no_other_hook(self, p: torch.Tensor) -> bool:
        """Return whether no other hook is called with a parameter's gradient, and might look at the weight."""
        return gradient_hooks(p) == self._own_hooks.get(id(p))

    def _ready(self, bucket: Bucket, guards: list[ForbiddenGradient], _: torch.Tensor) -> None:
        """Update a bucket whose last gradient has arrived, if all its gradients are there."""
        if self.accumulating:
            return
        grads = [p.grad for p in bucket.params]
        # No loop variable may outlive this check: are_kept() counts references to the gradients.
        if any(grad is None or type(grad) is ForbiddenGradient for grad in grads):
            return
        _check_gradient(grads[-1])  # type: ignore[arg-type]
        if are_kept(grads):  # the loop may change them before step(), which then updates the bucket
            return
        if self.state is State.READY and not same_groups(self.optimizer, self._groups):
            self.state = State.OUTDATED
        if not _fits(guards[-1], bucket.params[-1]):  # the model was converted after the watched step
            self.state = State.OUTDATED
        if self.state is State.OUTDATED:
            return
        self._begin_update(bucket)
        if not all(map(self._has_no_other_hook, bucket.params)):
            settle_gradients(bucket.params)
        self._side_updates.run(bucket.params, partial(self._update, bucket))
        mark_written(bucket.params)
        for p, guard in zip(bucket.params, guards, strict=True):
            p.grad = guard
        self._used_up.append((bucket.params, guards, list(map(version_of, bucket.params))))
        self._applied.append(bucket)

    def _update(self, bucket: Bucket) -> None:
        if self._norms.enabled:
            self._norms.add(bucket.params, [p.grad for p in bucket.params])  # type: ignore[misc]
        with no_autocast(bucket.params[0].device):
            self._stepper.step_bucket(bucket)
        self._states = len(self.optimizer.state)

    def _begin_update(self, bucket: Bucket) -> None:
        """Record the settings that this step uses, and note the backward, to tell at step() whether it failed."""
        if bucket in self._applied:
            raise GradweaveError(
                self._partial_message()
                if self._end.is_pending
                else 'a backward without step() after it: mode="backward" had already updated the weights; '
                "call step() after every backward that is not under fusion.no_update(), or " + REMEDY
            )
        if self.state is State.READY:
            self.state = State.UPDATED
            self._settings = StepSnapshot(self.optimizer).groups
            self._optimizer_state = self.optimizer.state
        self._end.note()

    # At step()

    def check_stock_order(self, reason: str) -> None:
        """Raise: a step cannot be in stock order, since backward has updated parameters before it is called."""
        self._hidden.restore()
        raise GradweaveError(f'{reason}: mode="backward" has updated by then; call step() by itself, or {REMEDY}')

    def before_step(self, is_last: bool) -> None:  # noqa: ARG002
        """Check what the loop has done since backward, and hide what backward has updated."""
        self._side_updates.join()
        self._hidden.restore()
        self._check_untouched()
        if self.state is State.WATCHING:
            self._watched.give_back()
            self._norms.add(list(self._watched.gradients), list(self._watched.gradients.values()))
            return
        if self._end.is_pending:
            raise GradweaveError(self._partial_message())
        self._check_settings()
        done = sum(len(bucket.params) for bucket in self._applied)
        left: list[nn.Parameter] = []
        if done < sum(len(group["params"]) for group in self.optimizer.param_groups):
            applied = {id(p) for bucket in self._applied for p in bucket.params}
            params = (p for group in self.optimizer.param_groups for p in group["params"])
            left = [p for p in params if id(p) not in applied]
            if any(type(p.grad) is ForbiddenGradient for p in left):
                raise GradweaveError(
                    'step() without a backward() of its own: mode="backward" uses each gradient once, during backward; '
                    "a loaded checkpoint, too, needs zero_grad() and a new backward() before step()"
                )
        if self._norms.enabled:
            with_grad = [p for p in left if p.grad is not None]
            self._norms.add(with_grad, [p.grad for p in with_grad])  # type: ignore[misc]
        self._hidden.hide_all_but(left)

    def _check_untouched(self) -> None:
        """Raise if a gradient was replaced, or a weight changed, since backward."""
        guarded = self._used_up
        if self.state is State.WATCHING:
            self._watched.check_hidden_changes()
            guarded = [self._watched.guarded]
        for params, guards, versions in guarded:
            for p, guard, version in zip(params, guards, versions, strict=True):
                if p.grad is not guard:
                    raise self._refuse_use("an assignment")
                if version_of(p) != version:
                    raise weight_changed()

    def _check_settings(self) -> None:
        """Raise if hyperparameters or state have changed since backward used them."""
        if not self._applied:
            return
        if self.optimizer.state is not self._optimizer_state or len(self.optimizer.state) < self._states:
            raise GradweaveError(
                'the optimizer\'s state was cleared or replaced between backward() and step(): mode="backward" has '
                f"already used the old one; do that after step(), or {REMEDY}"
            )
        for index, (then, now) in enumerate(zip(self._settings, self.optimizer.param_groups, strict=False)):
            for key, value in then.items():
                current: Any = now.get(key)
                same = torch.equal(value, current) if isinstance(value, torch.Tensor) else bool(value == current)
                if not same:
                    raise GradweaveError(
                        f"param_groups[{index}][{key!r}] changed from {value} to {current} between backward() and "
                        f'step(): mode="backward" has already used the old value; change it after step(), or {REMEDY}'
                    )

    def _partial_message(self) -> str:
        done = sum(len(bucket.params) for bucket in self._applied)
        names = ", ".join(str(bucket.number) for bucket in self._applied)
        return (
            f"backward failed after it had updated bucket(s) {names} of {len(self.buckets)} "
            f"({done} of {len(self._known)} parameters, with their optimizer state); the others are as before. "
            "Load a checkpoint of model and optimizer, or call fusion.accept_partial() to go on from here"
        )

    def after_step(self) -> None:
        """Close the step; gradients may not be used until the next backward."""
        self._hidden.restore()
        if self._norms.enabled:
            self._norms.end_step([p for group in self.optimizer.param_groups for p in group["params"]])
        self._forget_updates()
        self._steps += 1
        if self.state is State.WATCHING:
            self._after_watched_step()
        elif self.state is State.OUTDATED or (
            self._steps % _RECHECK_STEPS == 0 and not same_objects(self._trainable(), self._known)
        ):
            self._watch()

    def _after_watched_step(self) -> None:
        self._watched.end_step()
        used = list(self._watched.gradients)
        if self._watched.backwards_discarded > 0 and self._steps == 1:
            # A loop may skip one batch before its first step; the second step shows whether it skips more.
            self._watched.clear()
        elif not all(p.requires_grad for p in used):
            # Frozen since its gradient arrived, so that it can have no hook: watch another step of those that train.
            self._watched.clear()
            self._watch()
        elif used:
            self._end_watching()
            for p in used:
                p.grad = self._guards[p]


def _check_gradient(gradient: torch.Tensor) -> None:
    """Raise for a gradient that no update in backward can use up."""
    if torch.is_grad_enabled():
        raise GradweaveError(
            'backward(create_graph=True): mode="backward" updates weights that a second backward would need; ' + REMEDY
        )
    if gradient.layout is not torch.strided:
        raise GradweaveError(
            f'a gradient has layout {gradient.layout}: mode="backward" takes dense gradients; '
            "construct the embedding with sparse=False"
        )


def _fits(guard: ForbiddenGradient, p: nn.Parameter) -> bool:
    """Return whether a guard can still stand for a parameter's gradient; the model may have been converted."""
    return guard.dtype is p.dtype and guard.device == p.device and guard.shape == p.shape


class _SideStreamUpdates:
    """Updates on the second stream that computes late gradients, joined with the backward's stream.

    An update of late gradients runs on their stream, after them, while the backward goes on. One such update is active
    at a time: before the next one begins, and when the backward ends, the backward's stream waits for it.
    """

    def __init__(self) -> None:
        self._active: _SideStreamUpdate | None = None

    def run(self, params: Sequence[nn.Parameter], update: Callable[[], None]) -> None:
        """Update parameters with the gradients in their ``.grad``, late or not."""
        sources = [p.grad.source for p in params if type(p.grad) is LateGradient]
        side = sources[0].stream if sources else None
        if side is None:
            settle_gradients(params)
            update()
            return
        self.join()
        main = torch.cuda.current_stream(side.device)
        # Gradients of the bucket that are not late, and the weights' last uses, are on the backward's stream.
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for p in params:
                if type(p.grad) is LateGradient:
                    p.grad = p.grad.source.ready()
            gradients = [p.grad for p in params]
            try:
                update()
            finally:  # an update that fails has launched work, too, which reads the gradients
                self._active = _SideStreamUpdate(main, side.record_event(), sources, gradients)

    def join(self) -> None:
        """Make the backward's stream, and the current one, wait for the active update."""
        if self._active is not None:
            active, self._active = self._active, None
            for stream in (active.main, torch.cuda.current_stream(active.main.device)):
                stream.wait_event(active.done)
            for source in active.sources:
                source.done(active.done)


@dataclass(frozen=True)
class _SideStreamUpdate:
    """An update on a second stream that the backward's stream has not waited for.

    Attributes:
        main: Stream of the backward.
        done: End of the update.
        sources: Sources of the late gradients.
        gradients: Gradients of the bucket, kept alive: their memory must not be reused by the backward's stream before
            it has waited.
    """

    main: torch.cuda.Stream
    done: torch.cuda.Event
    sources: Sequence[Source]
    gradients: Sequence[torch.Tensor | None]
