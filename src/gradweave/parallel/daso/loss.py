"""The losses of a loop: values that its user reports, and the scale that a ``GradScaler`` gives them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gradweave._compat.amp import ready_scaler_tensors
from gradweave.parallel.daso.flat_buffers import Layout


class ReportedLoss:
    """The loss since the last exchange: the mean of reported batches, or else the loss of an epoch.

    Attributes:
        epoch: Mean loss of the last epoch; not a number if it was not reported.
    """

    def __init__(self) -> None:
        self.epoch = math.nan
        self._batches: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of a batch."""
        # Kept as a tensor: reading its value here would wait for the GPU in every step.
        self._batches.append(loss.detach())

    def take(self) -> float:
        """Return the loss since the last call; not a number if none was reported."""
        loss, self.epoch = self.epoch, math.nan
        if self._batches:
            loss, self._batches = float(torch.stack(self._batches).float().mean()), []
        return loss


class LossScale:
    """The scale of a ``GradScaler``, which nodes must agree on before they average scaled gradients.

    Args:
        scaler: The loop's; None, or a disabled one, for losses that are not scaled.
        device: Device of the weights.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, device: torch.device) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._device = device

    @property
    def is_used(self) -> bool:
        """Whether losses are scaled."""
        return self._scaler is not None

    @property
    def value(self) -> float:
        """The present scale; 1 without a scaler."""
        return 1.0 if self._scaler is None else float(ready_scaler_tensors(self._scaler, self._device)[0])

    def layout(self) -> Layout:
        """Return the layout of the scale, to be averaged over nodes; an empty one without a scaler."""
        return Layout() if self._scaler is None else Layout([ready_scaler_tensors(self._scaler, self._device)[0]])

    def restart_growth(self) -> None:
        """Reset the count of steps until the scale grows: once nodes agree on it, it must grow in the same step."""
        if self._scaler is not None:
            ready_scaler_tensors(self._scaler, self._device)[1].zero_()

    @torch.no_grad()
    def rescale(self, params: Iterable[torch.Tensor], before: float) -> None:
        """Multiply gradients that were scaled by ``before`` to the present scale."""
        factor = self.value / before
        for p in params:
            if factor != 1 and p.grad is not None:
                p.grad.mul_(factor)
