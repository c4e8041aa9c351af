"""What the user tells about losses, until an exchange asks."""

from __future__ import annotations

import math

import torch


class Losses:
    """Losses of batches, whose mean counts, or of an epoch."""

    def __init__(self) -> None:
        self.epoch = math.nan
        self._batches: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """Takes the loss of a batch, without waiting for it."""
        self._batches.append(loss.detach())

    def take(self) -> float:
        """What was told since this was asked last; not a number if nothing."""
        loss, self.epoch = self.epoch, math.nan
        if self._batches:
            loss, self._batches = float(torch.stack(self._batches).float().mean()), []
        return loss
