"""Backward-fusion: each bucket is updated, and its gradients freed, while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.eager import (
    are_kept,
    at_end_of_backward,
    current_backward,
    gradient_hooks,
    storage_users,
)
from gradweave._runtime.buckets import Bucket, make_buckets, mark_written, same_groups, same_objects
from gradweave._runtime.deferred.forbidden import ForbiddenGradient, forbidden_gradient
from gradweave._runtime.deferred.late import settle_gradients
from gradweave._runtime.optimizer_steps.hooks import HiddenParams
from gradweave._runtime.optimizer_steps.partial import FrozenStep, PartialStepper, no_autocast
from gradweave._runtime.replicas import digest
from gradweave.errors import GradweaveError
from gradweave.fusion.grad_norm import NormTracker
from gradweave.fusion.side_stream import UpdatesBeside

_MOST_BUCKETS = 24
"""On a GPU: so that about a twenty-fourth of the gradients is alive at a time."""
_RECHECK_STEPS = 16
"""How often to look for parameters that were frozen, unfrozen or added; until then step() takes care of them."""
REMEDY = 'use mode="forward", which keeps gradients until step()'


class BackwardEngine:
    """Updates buckets from inside backward.

    The first step runs in stock order while gradients are watched: a loop that reads or changes
    ``.grad`` between ``backward()`` and ``step()``, or that runs several backwards per step, is
    refused before any weight has moved. It also shows the order in which gradients arrive. From
    then on one hook per bucket, on the parameter whose gradient arrives last, updates the bucket;
    what is not ready then (an unused parameter, another order) is left to ``step()``.
    """

    def __init__(self, optimizer: Optimizer, norms: NormTracker) -> None:
        self.optimizer = optimizer
        self.accumulating = False
        self.buckets: list[Bucket] = []
        self._norms = norms
        self._stepper = PartialStepper(optimizer)
        self._beside = UpdatesBeside()
        self._own_hooks: dict[int, int] = {}
        self._hidden = HiddenParams(optimizer)
        self._guards: dict[nn.Parameter, ForbiddenGradient] = {}
        self._hooks: list[Any] = []
        self._watched: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}
        self._watched_in = -1
        self._watched_whole = False
        self._watched_kept = False
        self._thrown_away = 0
        self._weights: dict[nn.Parameter, torch.Tensor] = {}
        self._spent: list[tuple[Sequence[nn.Parameter], list[ForbiddenGradient], list[int]]] = []
        self._stale = False
        self._applied: list[Bucket] = []
        self._settings: list[dict[str, Any]] | None = None
        self._state: Any = None
        self._states = 0
        self._running: set[int] = set()
        self._steps = 0
        self._on_state: list[Any] = []
        try:
            self._on_state.append(optimizer.register_load_state_dict_post_hook(lambda _: self.accept_partial()))
            self._on_state.append(optimizer.register_state_dict_pre_hook(lambda _: self._hidden.restore()))
            self._watch()
        except BaseException:
            self.detach()
            raise

    def detach(self, *, keep_guards: bool = False) -> None:
        """Takes every hook away; ``.grad`` is then what is left for a stock step.

        Args:
            keep_guards: Leave used-up gradients guarded, for another engine to go on from there.
        """
        self._beside.join()
        self._hidden.restore()
        for hook in self._on_state:
            hook.remove()
        self._remove_hooks()
        for p, (grad, _) in self._watched.items():
            if p.grad is self._guards[p]:
                p.grad = None  # the model may have been converted meanwhile, and what stood for the gradient not
                p.grad = grad.to(p)
        self._watched.clear()
        if not keep_guards:
            for p, guard in self._guards.items():
                if p.grad is guard:
                    p.grad = None

    def flush(self) -> None:
        """Nothing is ever pending: updates are done when backward is."""

    def accept_partial(self) -> None:
        """Goes on from weights of which a failed backward has updated some."""
        self._beside.join()
        self._running.clear()
        self._applied = []
        self._spent = []
        self._settings = None

    def record(self, recorder: Callable[[int], AbstractContextManager[None]] | None) -> None:
        """Lets a recorder see when each bucket is updated."""
        self._stepper.recorder = recorder

    def describe(self) -> str:
        """What it does, for explain()."""
        if self._watching:
            return "watching the first step, in stock order"
        return f"{len(self.buckets)} bucket(s) updated while backward goes on, gradients freed at once"

    # Watching

    def _watch(self) -> None:
        self._remove_hooks()
        self._watching = True
        self._stale = False
        self._known = self._trainable()
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        for p in self._known:
            if p not in self._guards or not _fits(self._guards[p], p):
                self._guards[p] = forbidden_gradient(p, self._refuse_use)
            self._hooks.append(p.register_post_accumulate_grad_hook(self._set_aside))

    def _trainable(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _set_aside(self, p: torch.Tensor) -> None:
        """While watching: hides a gradient, so that whatever touches it is noticed."""
        if self.accumulating or not isinstance(p, nn.Parameter) or p.grad is None:
            return
        self._check_gradient(p.grad)
        if p.grad.dtype is not p.dtype:
            raise GradweaveError(
                f"a gradient has type {p.grad.dtype} and its weight {p.dtype}: the model was converted after "
                "the forward; convert it before, or call zero_grad() and run the forward again"
            )
        running = current_backward()
        if running != self._watched_in:
            self._begin_watching(p, running)
        self._watched_kept |= are_kept([p.grad])
        self._watched[p] = (p.grad, p._version)
        if not _fits(self._guards[p], p):  # the model was converted since the engine was attached
            self._guards[p] = forbidden_gradient(p, self._refuse_use)
        p.grad = self._guards[p]

    def _begin_watching(self, p: nn.Parameter, running: int) -> None:
        """The first gradient of a backward: those of one before must have been used, or it must have failed."""
        if self._watched and all(q is p or q.grad is None for q in self._watched):
            self._thrown_away += self._watched_whole
            if self._thrown_away > 1:
                raise GradweaveError(
                    'gradients of a backward were cleared without a step(): mode="backward" would have updated the '
                    f"weights with them; no weight has been changed; {REMEDY}"
                )
            self._watched.clear()
        self._watched_in = running
        self._watched_whole = False
        self._watched_kept = False
        at_end_of_backward(self._end_watched_backward)
        with torch.no_grad():
            self._weights = {q: digest(q.detach()) for q in self._known}

    def _end_watched_backward(self) -> None:
        self._watched_whole = True

    def _check_gradient(self, grad: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise GradweaveError(
                'backward(create_graph=True): mode="backward" updates weights that a second backward would need; '
                + REMEDY
            )
        if grad.layout is not torch.strided:
            raise GradweaveError(
                f'a gradient has layout {grad.layout}: mode="backward" takes dense gradients; '
                "build the embedding with sparse=False"
            )

    def _refuse_use(self, operation: str) -> GradweaveError:
        self._hidden.restore()
        if operation.startswith(("add_", "add.")):
            return GradweaveError(
                'a second backward before step() and zero_grad(): mode="backward" updates weights in the first; run '
                "all but the last under fusion.no_update(), call zero_grad() after step(), or " + REMEDY
            )
        if self._watching:
            return GradweaveError(
                f'{operation} on a .grad between backward() and step(): mode="backward" has used it up by then; '
                f"no weight has been changed; {REMEDY}"
            )
        return GradweaveError(
            f'{operation} on a .grad that is gone: mode="backward" frees gradients during backward(); {REMEDY}'
        )

    def _arm(self) -> None:
        """The watched step is over: from now on buckets are updated in backward."""
        self._remove_hooks()
        self.buckets = make_buckets(self.optimizer, self._watched, _MOST_BUCKETS, "backward")
        self._watched = {}
        self._watching = False
        for bucket in self.buckets:
            ready = partial(self._arrived, bucket, [self._guards[p] for p in bucket.params])
            self._hooks.append(bucket.params[-1].register_post_accumulate_grad_hook(ready))
            self._own_hooks.update({id(p): int(p is bucket.params[-1]) for p in bucket.params})

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._own_hooks = {}

    def takes_late(self, p: torch.Tensor) -> bool:
        """Whether a gradient that arrives now is next used by an update here, which can wait for it."""
        return not (self.accumulating or self._stale) and self._is_ours_alone(p)

    def _is_ours_alone(self, p: torch.Tensor) -> bool:
        """Whether nobody else is called with a parameter's gradient, who might look at the weight."""
        return gradient_hooks(p) == self._own_hooks.get(id(p))

    # During backward

    def _arrived(self, bucket: Bucket, guards: list[ForbiddenGradient], _: torch.Tensor) -> None:
        self._ready(bucket, guards)

    def _ready(self, bucket: Bucket, guards: list[ForbiddenGradient]) -> None:
        """The bucket's last gradient has arrived: updates it if all of them are there."""
        if self.accumulating:
            return
        grads = [p.grad for p in bucket.params]
        for grad in grads:
            if grad is None or type(grad) is ForbiddenGradient:
                return
        self._check_gradient(grads[-1])  # type: ignore[arg-type]
        if are_kept(grads):  # perhaps for the loop to change them before step(), which then takes care of them
            return
        if self._settings is None:
            self._stale = not same_groups(self.optimizer, self._groups)
        if self._stale or not _fits(guards[-1], bucket.params[-1]):
            self._stale = True
            return
        self._begin_update(bucket)
        if not all(self._is_ours_alone(p) for p in bucket.params):
            settle_gradients(bucket.params)
        self._beside.run(bucket.params, partial(self._update, bucket))
        mark_written(bucket.params)
        for p, guard in zip(bucket.params, guards, strict=True):
            p.grad = guard
        self._spent.append((bucket.params, guards, [p._version for p in bucket.params]))
        self._applied.append(bucket)

    def _update(self, bucket: Bucket) -> None:
        if self._norms.enabled:
            self._norms.add(bucket.params, [p.grad for p in bucket.params])  # type: ignore[misc]
        with no_autocast(bucket.params[0].device):
            self._stepper.step_bucket(bucket)
        self._states = len(self.optimizer.state)

    def _begin_update(self, bucket: Bucket) -> None:
        """Keeps account of what this step has used, and notices when its backward is through."""
        if bucket in self._applied:
            raise GradweaveError(
                self._partial_message()
                if self._running
                else 'a backward without step() after it: mode="backward" had already updated the weights; '
                "call step() after every backward that is not under fusion.no_update(), or " + REMEDY
            )
        if self._settings is None:
            self._settings = FrozenStep(self.optimizer).groups
            self._state = self.optimizer.state
        running = current_backward()
        if running not in self._running:
            self._running.add(running)
            at_end_of_backward(lambda: self._running.discard(running))

    # At step()

    def check_stock_order(self, reason: str) -> None:
        """Refuse a step that has to be in stock order: backward has updated parameters before it is called."""
        self._hidden.restore()
        raise GradweaveError(f'{reason}: mode="backward" has updated by then; call step() by itself, or {REMEDY}')

    def before_step(self, is_last: bool) -> None:  # noqa: ARG002
        """Leaves for the optimizer's own update what backward has not updated."""
        self._beside.join()
        self._hidden.restore()
        self._check_untouched()
        if self._watching:
            for p, (grad, _) in self._watched.items():
                p.grad = grad
            self._norms.add(list(self._watched), [grad for grad, _ in self._watched.values()])
            return
        if self._running:
            raise GradweaveError(self._partial_message())
        self._check_settings()
        done = sum(len(bucket.params) for bucket in self._applied)
        left: list[nn.Parameter] = []
        if done < self._count():
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
        """Gradients must not have been replaced, nor weights changed, since backward."""
        spent = self._spent
        if self._watching:
            self._check_watched()
            watched = list(self._watched)
            spent = [(watched, [self._guards[p] for p in watched], [v for _, v in self._watched.values()])]
        for params, guards, versions in spent:
            for p, guard, version in zip(params, guards, versions, strict=True):
                if p.grad is not guard:
                    raise self._refuse_use("an assignment")
                if p._version != version:
                    raise GradweaveError(
                        'a weight was changed between backward() and step(): mode="backward" updates it during '
                        f"backward, so that the order would differ from stock; change it after step(), or {REMEDY}"
                    )

    def _check_watched(self) -> None:
        """What the versions of tensors do not tell: weights changed through .data, gradients that share memory."""
        if any(not torch.equal(digest(p.detach()), before) for p, before in self._weights.items()):
            raise GradweaveError(
                'a weight was changed through .data between backward() and step(): mode="backward" updates it during '
                f"backward, so that the order would differ from stock; change it after step(), or {REMEDY}"
            )
        if self._watched_kept or any(storage_users(grad) > 1 for grad, _ in self._watched.values()):
            raise GradweaveError(
                "a .grad is kept by the loop, or shares its memory with another tensor (a flat buffer of gradients?): "
                f'mode="backward" frees gradients during backward, so that the other would not see them; {REMEDY}'
            )

    def _count(self) -> int:
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def _check_settings(self) -> None:
        """Hyperparameters and state must not have changed since backward used them."""
        if self._settings is None:
            return
        if self.optimizer.state is not self._state or len(self.optimizer.state) < self._states:
            raise GradweaveError(
                'the optimizer\'s state was cleared or replaced between backward() and step(): mode="backward" has '
                f"already used the former; do that after step(), or {REMEDY}"
            )
        for index, (then, now) in enumerate(zip(self._settings, self.optimizer.param_groups, strict=False)):
            for key, value in then.items():
                current: Any = now.get(key)
                same = torch.equal(value, current) if isinstance(value, torch.Tensor) else bool(value == current)
                if not same:
                    raise GradweaveError(
                        f"param_groups[{index}][{key!r}] changed from {value} to {current} between backward() and "
                        "step(): "
                        f'mode="backward" has already used the former; change it after step(), or {REMEDY}'
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
        """Closes the step; from here to the next backward, gradients may not be used."""
        self._hidden.restore()
        if self._norms.enabled:
            self._norms.end_step([p for group in self.optimizer.param_groups for p in group["params"]])
        self._applied = []
        self._spent = []
        self._weights = {}
        self._settings = None
        self._steps += 1
        if self._watching and self._watched and self._thrown_away > 0 and self._steps == 1:
            self._watched = {}  # one batch may be left out before the first step; whether more are shows in the second
        elif self._watching and any(not p.requires_grad for p in self._watched):
            self._watched = {}  # frozen since its gradient came: another step is watched, with those that train now
            self._watch()
        elif self._watching and self._watched:
            used = self._watched
            self._arm()
            for p in used:
                p.grad = self._guards[p]
        elif not self._watching and (self._stale or (self._steps % _RECHECK_STEPS == 0 and self._changed())):
            self._watch()

    def _changed(self) -> bool:
        return not same_objects(self._trainable(), self._known)


def _fits(guard: ForbiddenGradient, p: nn.Parameter) -> bool:
    """Whether a guard can still stand for a parameter's gradient; a model may have been converted."""
    return guard.dtype is p.dtype and guard.device == p.device and guard.shape == p.shape
