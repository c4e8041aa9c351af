"""Updates without a barrier between steps: each bucket when its gradients are averaged and it is used again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.compat.eager import no_torch_function, without_function_mode
from gradweave.data_parallel.gradients import pending_class
from gradweave.data_parallel.held_back import HeldBack
from gradweave.data_parallel.reducer import Reducer
from gradweave.fusion.buckets import Bucket
from gradweave.fusion.forward import ForwardEngine
from gradweave.fusion.norms import NormTracker
from gradweave.fusion.pending import restore


class AveragedUpdates(ForwardEngine):
    """Forward-fusion whose buckets are the reducer's messages, and whose updates wait for them.

    Gradients stay where they are behind ``step()``: whoever looks at one, or adds to it, has its update done first.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, reducer: Reducer) -> None:
        super().__init__(model, optimizer, NormTracker(enabled=False))
        self._reducer = reducer
        self._shown_classes: dict[int, type[torch.Tensor]] = {}
        self._shown: dict[int, list[torch.Tensor]] = {}

    def resolve(self, p: nn.Parameter) -> None:
        """Brings a parameter up to date if its update is pending."""
        self._resolve_param(p)

    def discard(self) -> None:
        """Forgets what is pending: weights stay as they are, and the optimizer's state."""
        for update in self._pending.values():
            restore(update.bucket.params, self._guards)
            for p in update.bucket.params:
                p.grad = None
        self._pending.clear()
        self._shown.clear()
        if self._state is not None:
            self.optimizer.state, self._state = self._state, None

    def before_step(self, is_last: bool) -> None:
        """As in forward-fusion, but gradients can still be seen."""
        super().before_step(is_last)
        for update in self._pending.values():
            shown_class = self._shown_class(update.bucket.number)
            self._shown[update.bucket.number] = []
            for p, grad in zip(update.bucket.params, update.grads, strict=True):
                with no_torch_function():
                    shown = grad.view_as(grad)
                shown.__class__ = shown_class
                p.grad = shown
                self._shown[update.bucket.number].append(shown)

    def _shown_class(self, number: int) -> type[torch.Tensor]:
        if number not in self._shown_classes:
            self._shown_classes[number] = pending_class(partial(partial, self._show, number))
        return self._shown_classes[number]

    def _show(self, number: int) -> None:
        if number in self._pending:
            self._resolve(self._pending[number])

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
        for grad in self._shown.pop(update.bucket.number, ()):
            grad.__class__ = torch.Tensor

    def _learned(self, params: list[nn.Parameter]) -> None:
        super()._learned(params)
        self.buckets = _as_updated(self.optimizer, [message.params for message in self._reducer.messages])
        self._bucket_of = {id(p): bucket.number for bucket in self.buckets for p in bucket.params}

    def _apply(self, update: Any) -> None:
        self._reducer.wait_for(update.bucket.params)
        super()._apply(update)


def _as_updated(optimizer: Optimizer, buckets: Sequence[Sequence[nn.Parameter]]) -> list[Bucket]:
    """The parts of buckets that an optimizer updates."""
    group_of = {
        id(p): (index, position)
        for index, group in enumerate(optimizer.param_groups)
        for position, p in enumerate(group["params"])
    }
    made: list[Bucket] = []
    for params in buckets:
        own = [p for p in params if id(p) in group_of]
        groups: dict[int, list[nn.Parameter]] = {}
        for p in sorted(own, key=lambda p: group_of[id(p)]):
            groups.setdefault(group_of[id(p)][0], []).append(p)
        if own:
            made.append(Bucket(len(made), tuple(own), groups))
    return made
