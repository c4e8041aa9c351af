"""Costs of layers, measured in the form in which plans are made from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from gradweave.schedule.costs import Costs


def measure_layers(
    model: nn.Sequential,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    batch: tuple[Any, Any],
    *,
    optimizer: Optimizer | None = None,
) -> Costs:
    """Measure the costs of a model's layers on their device, for :class:`Pipeline`.

    Args:
        model: The whole model, or one with fewer layers of the same kinds.
        loss_fn: Called as ``loss_fn(output, target)``.
        batch: Input and target of one micro-batch.
        optimizer: Its update is measured (default: plain SGD).
    """
    from gradweave.profile import measure_costs

    def loss(whole: nn.Module, x: Any, target: Any) -> torch.Tensor:
        return loss_fn(whole(x), target)

    return measure_costs(model, loss, optimizer or SGD(model.parameters(), lr=0.0), batch)
