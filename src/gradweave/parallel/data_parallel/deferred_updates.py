"""Updates without a barrier between steps: each bucket is updated when it is used again, with averaged gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.functions import no_torch_function, without_function_mode
from gradweave._runtime.buckets import Bucket, with_groups
from gradweave._runtime.deferred.deferred_updates import DeferredUpdates
from gradweave._runtime.deferred.pending_gradient import make_gradient_pending
from gradweave._runtime.deferred.pending_updates import Update, UpdateRules
from gradweave.parallel.data_parallel.reducer import Reducer
from gradweave.parallel.data_parallel.reverse_first_k import HeldBack


class AveragedUpdates:
    """Deferred updates whose buckets are the reducer's messages; an update waits for its own message only.

    Gradients stay where they are after ``step()``: reading one, or adding to it, has its update done first.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, reducer: Reducer) -> None:
        self._updates = DeferredUpdates(model, optimizer, _AveragingRules(optimizer, reducer))

    def before_step(self, is_last: bool) -> None:
        """Decide which updates are deferred; the optimizer's own step leaves those out."""
        self._updates.decide(self._updates.open_step(), is_last=is_last)

    def after_step(self) -> None:
        """Close the step: deferred updates are pending from here on."""
        self._updates.after_step()

    def resolve(self, p: nn.Parameter) -> None:
        """Bring a parameter up to date if its update is pending."""
        self._updates.pending.resolve(p)

    def flush(self) -> None:
        """Apply all pending updates."""
        self._updates.flush()

    def discard(self) -> None:
        """Forget all pending updates; weights and the optimizer's state stay as they are."""
        self._updates.pending.discard()

    def detach(self) -> None:
        """Apply all pending updates and remove every hook."""
        self._updates.detach()


class _AveragingRules(UpdateRules):
    """Rules by which buckets are messages, and gradients are parts of them."""

    name = "DataParallel"
    compile_remedy = "give DataParallel the plain model and do not compile it, or use DistributedDataParallel"

    def __init__(self, optimizer: Optimizer, reducer: Reducer) -> None:
        self._optimizer = optimizer
        self._reducer = reducer

    def buckets(self, used: Sequence[nn.Parameter]) -> list[Bucket]:  # noqa: ARG002
        """Return a bucket for each message, with the parameters that the optimizer updates."""
        return with_groups(self._optimizer, [message.params for message in self._reducer.messages])

    def may_hold(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is dense: it is a part of the reducer's message, which nothing else refers to."""
        return gradient.layout is torch.strided

    def stand_in(self, gradient: torch.Tensor, resolve: Callable[[], None]) -> torch.Tensor:
        """Return an alias of the gradient: the gradient itself is pending until its message has arrived."""
        with no_torch_function():
            seen = gradient.view_as(gradient)
        make_gradient_pending(seen, resolve)
        return seen

    def before_update(self, update: Update) -> None:
        """Wait for the messages with the gradients of an update."""
        self._reducer.wait_for(update.bucket.params)

    def due(self, update: Update, pending: Sequence[Update]) -> Iterator[Update]:
        """Yield an update, after others whose gradients have arrived while its own are on their way."""
        if update.event is None and not self._has_arrived(update):
            for other in pending:
                if self._has_arrived(update):
                    break
                if other is not update and self._has_arrived(other):
                    yield other
        yield update

    def _has_arrived(self, update: Update) -> bool:
        return self._reducer.message_of(update.bucket.params[0]).has_arrived

    def surroundings(self) -> AbstractContextManager[Any]:
        """Return a context without the mode that intercepts a forward's calls: an update is not part of the forward."""
        return without_function_mode(HeldBack)
