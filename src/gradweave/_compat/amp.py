"""Private names of torch.amp: the state of a GradScaler."""

from __future__ import annotations

import torch

unscale_in_place = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply tensors by a factor, and set a flag to 1 if any is not finite."""


update_scale_in_place = torch._amp_update_scale_
"""Let a loss scale grow or back off."""


def scaler_tensors(scaler: torch.amp.GradScaler) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the growth tracker, which exist once something was scaled."""
    return scaler._scale, scaler._growth_tracker  # type: ignore[return-value]


def ready_scaler_tensors(scaler: torch.amp.GradScaler, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the growth tracker, made if nothing was scaled yet."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    return scaler_tensors(scaler)
