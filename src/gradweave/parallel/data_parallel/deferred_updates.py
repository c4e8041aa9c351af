"""Updates without a barrier between steps: each bucket when its gradients are averaged and it is used again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.eager import no_torch_function, without_function_mode
from gradweave._runtime.buckets import with_groups
from gradweave._runtime.deferred.pending_gradient import make_gradient_pending
from gradweave._runtime.deferred.pending_parameter import restore, show
from gradweave.fusion.forward import ForwardEngine
from gradweave.fusion.grad_norm import NormTracker
from gradweave.parallel.data_parallel.reducer import Reducer
from gradweave.parallel.data_parallel.reverse_first_k import HeldBack


class AveragedUpdates(ForwardEngine):
    """Forward-fusion whose buckets are the reducer's messages, and whose updates wait for them.

    Gradients stay where they are behind ``step()``: whoever looks at one, or adds to it, has its update done first.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, reducer: Reducer) -> None:
        super().__init__(model, optimizer, NormTracker(enabled=False))
        self._reducer = reducer

    def resolve(self, p: nn.Parameter) -> None:
        """Brings a parameter up to date if its update is pending."""
        self._resolve_param(p)

    def discard(self) -> None:
        """Forgets what is pending: weights stay as they are, and the optimizer's state."""
        for update in self._pending.values():
            for p in update.bucket.params:
                show(p, None)
                restore(p)
                p.grad = None
        self._pending.clear()
        if self._state is not None:
            self.optimizer.state, self._state = self._state, None

    def _is_ours_to_hold(self, grad: torch.Tensor | None) -> bool:
        """A gradient is a part of the reducer's message, which nothing else refers to."""
        return grad is not None and grad.layout is torch.strided

    def _seen(self, update: Any, p: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The gradient itself has a class of the reducer's while it is averaged."""
        with no_torch_function():
            seen = grad.view_as(grad)
        make_gradient_pending(seen, update.resolve)
        return seen

    def _make_visible(self, update: Any) -> None:
        """Uses the time until gradients arrive for updates whose gradients have arrived."""
        if update.event is None and not self._has_arrived(update):
            for other in [other for other in self._pending.values() if other is not update]:
                if self._has_arrived(update):
                    break
                if self._has_arrived(other):
                    self._show_update(other)
        self._show_update(update)

    def _has_arrived(self, update: Any) -> bool:
        return self._reducer.message_of(update.bucket.params[0]).has_arrived

    def _show_update(self, update: Any) -> None:
        with without_function_mode(HeldBack):  # which looks at every function that is called in a forward
            super()._make_visible(update)

    def _learned(self, params: list[nn.Parameter]) -> None:
        super()._learned(params)
        self.buckets = with_groups(self.optimizer, [message.params for message in self._reducer.messages])
        self._bucket_of = {id(p): bucket.number for bucket in self.buckets for p in bucket.params}

    def _apply(self, update: Any) -> None:
        self._reducer.wait_for(update.bucket.params)
        super()._apply(update)
