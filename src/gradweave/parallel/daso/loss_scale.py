"""The scale of losses, which nodes must have the same of before they average scaled gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradweave._compat.eager import ready_scaler_tensors
from gradweave.parallel.daso.flat_buffers import Layout


class LossScale:
    """What a ``GradScaler`` has; nothing without one."""

    def __init__(self, scaler: torch.amp.GradScaler | None, device: torch.device) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._device = device

    @property
    def used(self) -> bool:
        """Whether there is one."""
        return self._scaler is not None

    @property
    def value(self) -> float:
        """The scale at present."""
        return 1.0 if self._scaler is None else float(ready_scaler_tensors(self._scaler, self._device)[0])

    def layout(self) -> Layout:
        """The tensor that is to become the same on all nodes."""
        return Layout() if self._scaler is None else Layout([ready_scaler_tensors(self._scaler, self._device)[0]])

    def settled(self) -> None:
        """Told that it has become the same: it is to grow at the same steps, too."""
        if self._scaler is not None:
            ready_scaler_tensors(self._scaler, self._device)[1].zero_()

    @torch.no_grad()
    def rescale(self, params: Iterable[torch.Tensor], before: float) -> None:
        """Gradients that were scaled before nodes agreed."""
        factor = self.value / before
        for p in params:
            if factor != 1 and p.grad is not None:
                p.grad.mul_(factor)
