"""Forward fusion: step() defers updates, and each bucket is updated before its next use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.tensors import is_sole_user
from gradweave._runtime.buckets import Bucket, make_buckets
from gradweave._runtime.deferred.deferred_updates import DeferredUpdates, State
from gradweave._runtime.deferred.late import LateGradient, settled
from gradweave._runtime.deferred.pending_gradient import make_gradient_pending
from gradweave._runtime.deferred.pending_updates import UpdateRules
from gradweave.fusion.grad_norm import NormTracker

_MOST_BUCKETS = 3
"""Most buckets on a GPU: updates are launched one after the other anyway, and each launch costs the host."""


class ForwardEngine:
    """Defers updates past step().

    On CUDA updates are launched at step() on a second stream and run beside the next forward; the first use of a bucket
    makes its stream wait for the bucket's event. On the CPU a bucket is updated at its first use. The engine has the
    states of its :class:`~gradweave._runtime.deferred.deferred_updates.DeferredUpdates`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, norms: NormTracker) -> None:
        self.accumulating = False
        self._norms = norms
        self._updates = DeferredUpdates(model, optimizer, _ForwardRules(optimizer))

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer whose updates are deferred."""
        return self._updates.optimizer

    @property
    def buckets(self) -> list[Bucket]:
        """Parameters that one call updates, in the order of use."""
        return self._updates.buckets

    @property
    def stop_reason(self) -> str:
        """Reason why all updates stay at step(); empty if they are deferred."""
        return self._updates.stop_reason

    @property
    def in_graph(self) -> bool:
        """Whether a CUDA graph of several steps is being captured, in which updates may be pending."""
        return self._updates.pending.in_graph

    @in_graph.setter
    def in_graph(self, value: bool) -> None:
        self._updates.pending.in_graph = value

    @property
    def is_pending(self) -> bool:
        """Whether any update is pending."""
        return bool(self._updates.pending)

    def flush(self) -> None:
        """Apply everything that is pending, or wait for it."""
        self._updates.flush()

    def detach(self) -> None:
        """Apply what is pending and remove every hook."""
        self._updates.detach()

    def accept_partial(self) -> None:
        """Do nothing: no backward ever updates anything, so that none can fail halfway."""

    def record(self, recorder: Callable[[int], AbstractContextManager[None]] | None) -> None:
        """Run each bucket's update inside the recorder's context; None: no longer."""
        self._updates.pending.record(recorder)

    def describe(self) -> str:
        """Return what the engine does, for explain()."""
        if self._updates.state is State.STOPPED:
            return f"updates at step(), since {self.stop_reason}"
        if self._updates.state is State.LEARNING:
            return "running the first step in stock order"
        beside = self._updates.pending.runs_beside
        where = "on a second stream beside the next forward" if beside else "at their first use in the next forward"
        return f"{len(self.buckets)} bucket(s) updated {where}"

    def check_stock_order(self, reason: str) -> None:
        """Do nothing: every step may be in stock order."""

    def before_step(self, is_last: bool) -> None:
        """Decide which updates are deferred, and hide their parameters from the optimizer's own update."""
        params = self._updates.open_step()
        if self._norms.enabled:
            with_grad = [p for p in params if p.grad is not None]
            self._norms.add(with_grad, [p.grad for p in with_grad])  # type: ignore[misc]
            self._norms.end_step(params)
        self._updates.decide(params, is_last=is_last)

    def after_step(self) -> None:
        """Close the step: make the updates that were decided pending."""
        self._updates.after_step()


class _ForwardRules(UpdateRules):
    """Rules of forward fusion: its own buckets, and gradients that autograd or reordering has put into ``.grad``."""

    name = "fuse"
    compile_remedy = "call torch.compile() first, and give fuse() the compiled model"

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def buckets(self, used: Sequence[nn.Parameter]) -> list[Bucket]:
        """Return buckets in the order of use."""
        return make_buckets(self._optimizer, used, _MOST_BUCKETS, "forward")

    def may_hold(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is late, or no other object refers to its memory."""
        if type(gradient) is LateGradient:
            return gradient.layout is torch.strided
        return type(gradient) is torch.Tensor and gradient.layout is torch.strided and is_sole_user(gradient)

    def stand_in(self, gradient: torch.Tensor, resolve: Callable[[], None]) -> torch.Tensor:
        """Return the gradient itself, made pending, or a late gradient whose use applies the update first."""
        if type(gradient) is LateGradient:
            return LateGradient(gradient, _UntilUpdated(resolve, gradient))
        make_gradient_pending(gradient, resolve)
        return gradient


class _UntilUpdated:
    """Source of a late gradient after step(): applies the update before the gradient is used."""

    stream = None

    def __init__(self, resolve: Callable[[], None], gradient: LateGradient) -> None:
        self._resolve = resolve
        self._gradient = gradient

    def settle(self) -> torch.Tensor:
        """Apply the update, and return the gradient."""
        self._resolve()
        result: torch.Tensor = settled(self._gradient)
        return result

    ready = settle

    def done(self, after: torch.cuda.Event | None = None) -> None:
        """Do nothing: the gradient was settled for all streams."""
