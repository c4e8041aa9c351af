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
    """Measures what the layers of a model cost, on the device they are on, for :class:`Pipeline`.

    Args:
        model: The whole of it, or one of fewer layers of the same kinds.
        loss_fn: Called as ``loss_fn(output, target)``.
        batch: Input and target of one micro-batch.
        optimizer: Whose update is measured; None counts updates as those of plain SGD.
    """
    from gradweave.profile import measure_costs

    def loss(whole: nn.Module, x: Any, target: Any) -> torch.Tensor:
        return loss_fn(whole(x), target)

    return measure_costs(model, loss, optimizer or SGD(model.parameters(), lr=0.0), batch)
