"""Updates without a barrier between steps: each bucket when its gradients are averaged and it is used again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradweave.data_parallel.reducer import Reducer
from gradweave.fusion.buckets import Bucket
from gradweave.fusion.forward import ForwardEngine
from gradweave.fusion.norms import NormTracker


class AveragedUpdates(ForwardEngine):
    """Forward-fusion whose buckets are the reducer's, and whose updates wait for them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, reducer: Reducer) -> None:
        super().__init__(model, optimizer, NormTracker(enabled=False))
        self._reducer = reducer

    def resolve(self, p: nn.Parameter) -> None:
        """Brings a parameter up to date if its update is pending."""
        self._resolve_param(p)

    def _learned(self, params: list[nn.Parameter]) -> None:
        super()._learned(params)
        self.buckets = _as_updated(self.optimizer, [bucket.params for bucket in self._reducer.buckets])
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
