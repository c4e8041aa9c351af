"""Shampoo (Gupta, Koren and Singer 2018)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gradweave.optim.apply import wide_dtype
from gradweave.optim.dense import DenseOptimizer
from gradweave.optim.family import Layer


class Shampoo(DenseOptimizer):
    """Shampoo: each mode of a gradient times the inverse 2k-th root of its summed second moment.

    The direction of each tensor gets its gradient's norm (grafting onto SGD), without which lr would
    have to be tuned anew for every refresh interval.

    Args:
        model: Whose parameters are updated.
        params: Parameters or groups, if not all of the model's.
        lr: Learning rate.
        damping: What the moments start with, times the identity.
        refresh: Steps from one root to the next.
        momentum: As in SGD.
        weight_decay: Added to the direction.
        decay: Of the moments from step to step; 1 sums them up.
        largest: Modes above this size are left alone.
        first_order: Rule for vectors and scalars.
        first_order_lr: Its learning rate.
        maximize: Go up, not down.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        lr: float | torch.Tensor = 0.1,
        damping: float = 1e-4,
        refresh: int = 10,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        decay: float = 1.0,
        largest: int = 8192,
        first_order: str = "sgd",
        first_order_lr: float | None = None,
        maximize: bool = False,
    ) -> None:
        self._decay = decay
        self._largest = largest
        defaults = {
            "lr": lr, "damping": damping, "momentum": momentum, "weight_decay": weight_decay, "kl_clip": 1.0,
            "running_average": 1.0, "first_order": first_order, "first_order_lr": first_order_lr,
            "first_order_weight_decay": weight_decay, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": maximize,
            "foreach": None, "rule": None,
        }  # fmt: skip
        super().__init__(model, params, refresh=refresh, defaults=defaults)

    def covered(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Every tensor of two or more dimensions."""
        return [p for p in params if p.dim() >= 2]

    def scale_of(self, layers: list[Layer], agreements: list[torch.Tensor]) -> torch.Tensor:  # noqa: ARG002
        """Directions have their gradients' norms already."""
        return torch.ones_like(agreements[0])

    def find_dense(self, layer: Layer, *, fresh: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Adds to the moments, takes roots if it is time, and multiplies mode by mode."""
        state = layer.state
        grad = layer.grad.to(wide_dtype(layer.grad))
        direction = grad
        for mode, size in enumerate(grad.shape):
            if size > self._largest or size == 1:
                continue
            unfolded = grad.movedim(mode, 0).flatten(1)
            key = f"moment_{mode}"
            if key not in state:
                state[key] = torch.eye(size, dtype=grad.dtype, device=grad.device) * layer.group["damping"]
            state[key].mul_(self._decay).add_(unfolded @ unfolded.t())
            if fresh:
                state[f"root_{mode}"] = _inverse_root(state[key], 2 * grad.dim())
            direction = torch.tensordot(state[f"root_{mode}"], direction.movedim(mode, 0), dims=1).movedim(0, mode)
        size = torch.linalg.vector_norm(direction)
        scale = torch.where(size > 0, torch.linalg.vector_norm(grad) / size, torch.zeros_like(size))
        return (direction * scale).to(layer.grad.dtype), None


def _inverse_root(moment: torch.Tensor, order: int) -> torch.Tensor:
    """``moment ** (-1 / order)`` of a positive matrix."""
    values, vectors = torch.linalg.eigh(moment.double())
    smallest = values[-1].clamp_min(1e-300) * 1e-14
    powers = torch.maximum(values, smallest) ** (-1 / order)
    root: torch.Tensor = vectors * powers @ vectors.t()
    return root.to(moment.dtype)
