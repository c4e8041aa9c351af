"""The gradient norm of a step whose gradients are freed before it ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gradweave._compat.foreach import norms_of
from gradweave.errors import GradweaveError


class NormTracker:
    """Collects each gradient's norm before it is freed, and combines the norms as clipping does."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        self._last: list[torch.Tensor] = []

    def add(self, params: Sequence[nn.Parameter], grads: Sequence[torch.Tensor]) -> None:
        """Add the norms of gradients that are about to be used up."""
        if self.enabled and grads:
            with torch.no_grad():
                self._norms.update(zip(params, norms_of(list(grads)), strict=True))

    def end_step(self, order: Sequence[nn.Parameter]) -> None:
        """Complete a step.

        Args:
            order: Parameters in the optimizer's order, on which the last bits of the sum depend.
        """
        if self.enabled:
            self._last = [self._norms[p] for p in order if p in self._norms]
            self._norms = {}

    def total(self) -> torch.Tensor:
        """Return the norm over all gradients of the last step."""
        if not self.enabled:
            raise GradweaveError(
                "grad_norm(): gradients are freed as they are used and norms were not kept; "
                "attach with fuse(..., track_grad_norm=True)"
            )
        if not self._last:
            raise GradweaveError("grad_norm(): no step has been taken yet; call it after optimizer.step()")
        device = self._last[0].device
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in self._last]))
        return total
