"""Loss scaling inside a traced step, as ``torch.amp.GradScaler`` does it around an eager one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.amp import GradScaler

from gradweave._compat.eager import scaler_tensors, unscale_in_place, update_scale_in_place


@dataclass(frozen=True)
class Scaling:
    """How the scale follows the gradients."""

    growth: float
    backoff: float
    interval: int

    @classmethod
    def of(cls, scaler: GradScaler) -> Scaling:
        """As a scaler is set."""
        return cls(scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())

    def unscale(self, grads: Sequence[torch.Tensor | None], scale: torch.Tensor) -> torch.Tensor:
        """Divides gradients by the scale, in place; returns whether any was not finite, as 0 or 1."""
        present = [grad for grad in grads if grad is not None]
        found = torch.zeros(1, device=scale.device)
        inverse = scale.double().reciprocal().float()
        unscale_in_place(present, found, inverse)
        return found

    def advance(self, scale: torch.Tensor, tracker: torch.Tensor, found: torch.Tensor) -> None:
        """Lets the scale grow, or back off, in place."""
        update_scale_in_place(scale, tracker, found, self.growth, self.backoff, self.interval)


def scaler_inputs(scaler: GradScaler | None) -> list[torch.Tensor]:
    """The tensors of a scaler that a step reads and writes: its scale and its count of good steps."""
    return [] if scaler is None else list(scaler_tensors(scaler))


def keep_if_found(tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor], found: torch.Tensor) -> None:
    """Undoes an update if a gradient was not finite."""
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(found[0] > 0, old, tensor))
