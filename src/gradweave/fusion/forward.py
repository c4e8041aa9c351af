"""Forward-fusion: step() hands the gradients over; each bucket is updated before its next use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.eager import is_sole_user
from gradweave._runtime.buckets import Bucket, make_buckets
from gradweave._runtime.deferred.late import LateGradient, settled
from gradweave._runtime.deferred.pending_gradient import make_gradient_pending
from gradweave._runtime.deferred.pending_updates import UpdateRules
from gradweave._runtime.deferred.updates import DeferredUpdates
from gradweave.fusion.grad_norm import NormTracker

_MOST_BUCKETS = 3
"""On a GPU: the updates are launched one after the other anyway, and each launch costs the host."""


class ForwardEngine:
    """Defers updates past step().

    On CUDA the updates are launched at step() on a second stream and run beside the next forward;
    the first use of a bucket makes its stream wait for the bucket's event. On the CPU a bucket is
    updated at its first use.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, norms: NormTracker) -> None:
        self.accumulating = False
        self._norms = norms
        self._updates = DeferredUpdates(model, optimizer, _ForwardRules(optimizer))

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer with its updates deferred."""
        return self._updates.optimizer

    @property
    def buckets(self) -> list[Bucket]:
        """What is updated at once, in the order of use."""
        return self._updates.buckets

    @property
    def stopped(self) -> str:
        """The reason why updates stay at step(); empty if they do not."""
        return self._updates.stopped

    @property
    def in_graph(self) -> bool:
        """Whether a CUDA graph of several steps is being captured, in which updates may be pending."""
        return self._updates.pending.in_graph

    @in_graph.setter
    def in_graph(self, value: bool) -> None:
        self._updates.pending.in_graph = value

    @property
    def is_pending(self) -> bool:
        """Whether updates are pending."""
        return bool(self._updates.pending)

    def flush(self) -> None:
        """Apply everything that is pending, or wait for it."""
        self._updates.flush()

    def detach(self) -> None:
        """Apply what is pending and take every hook away."""
        self._updates.detach()

    def accept_partial(self) -> None:
        """Do nothing: a step is handed over whole, and never partly applied."""

    def record(self, recorder: Callable[[int], AbstractContextManager[None]] | None) -> None:
        """Let a recorder see when each bucket is updated."""
        self._updates.pending.record(recorder)

    def describe(self) -> str:
        """Return what is done, for explain()."""
        if self.stopped:
            return f"updates at step(), since {self.stopped}"
        if not self._updates.has_learned:
            return "running the first step in stock order"
        beside = self._updates.pending.runs_beside
        where = "on a second stream beside the next forward" if beside else "at their first use in the next forward"
        return f"{len(self.buckets)} bucket(s) updated {where}"

    def check_stock_order(self, reason: str) -> None:
        """Do nothing: any step may be one in stock order."""

    def before_step(self, is_last: bool) -> None:
        """Decide what is deferred; the optimizer's own update finds nothing to do for that."""
        params = self._updates.open_step()
        if self._norms.enabled:
            with_grad = [p for p in params if p.grad is not None]
            self._norms.add(with_grad, [p.grad for p in with_grad])  # type: ignore[misc]
            self._norms.end_step(params)
        self._updates.decide(params, is_last=is_last)

    def after_step(self) -> None:
        """Close the step: what was decided is pending from here on."""
        self._updates.after_step()


class _ForwardRules(UpdateRules):
    """Forward-fusion's buckets are its own, and gradients are what autograd, or reordering, has put into ``.grad``."""

    name = "fuse"

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def buckets(self, used: Sequence[nn.Parameter]) -> list[Bucket]:
        """Return buckets in the order of use."""
        return make_buckets(self._optimizer, used, _MOST_BUCKETS, "forward")

    def may_hold(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is late, or nothing else refers to its memory."""
        if type(gradient) is LateGradient:
            return gradient.layout is torch.strided
        return type(gradient) is torch.Tensor and gradient.layout is torch.strided and is_sole_user(gradient)

    def stand_in(self, gradient: torch.Tensor, resolve: Callable[[], None]) -> torch.Tensor:
        """Return the gradient itself, pending, or one that is late until the update is done."""
        if type(gradient) is LateGradient:
            return LateGradient(gradient, _UntilUpdated(resolve, gradient))
        make_gradient_pending(gradient, resolve)
        return gradient


class _UntilUpdated:
    """The source of a late gradient once step() has been called: the update is done before the gradient is used."""

    stream = None

    def __init__(self, resolve: Callable[[], None], gradient: LateGradient) -> None:
        self._resolve = resolve
        self._gradient = gradient

    def settle(self) -> torch.Tensor:
        """Return the gradient, once the update with it is done."""
        self._resolve()
        result: torch.Tensor = settled(self._gradient)
        return result

    ready = settle

    def done(self, after: torch.cuda.Event | None = None) -> None:
        """Do nothing: nothing is left to do."""
