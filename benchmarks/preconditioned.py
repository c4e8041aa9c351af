"""What Shampoo, SOAP and Muon have in common: steps that a CUDA graph can hold, and decompositions between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Preconditioned(Optimizer):
    """An optimizer whose steps never wait for the device, and whose decompositions are made between them.

    A loop calls :meth:`between_steps` after each step, outside of what it has captured. Matrices are decomposed after
    the first step, and then after each so many.

    Args:
        params: As usual; tensors of more than two dimensions are matrices with a row for each of the first.
        defaults: Hyperparameters; ``lr`` may be a tensor, which a captured step reads anew.
        refresh: Steps from one decomposition to the next.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], *, refresh: int) -> None:
        self.refresh_every = refresh
        self.steps = 0
        super().__init__(params, defaults)

    def between_steps(self) -> None:
        """Decompose matrices if it is time."""
        self.steps += 1
        if self.steps == 1 or self.steps % self.refresh_every == 0:
            with torch.no_grad():
                self.refresh()

    def refresh(self) -> None:
        """Make the state that steps use of the state that they add to."""


def as_matrix(tensor: Tensor) -> Tensor:
    return tensor.flatten(1) if tensor.dim() > 1 else tensor


def update(p: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    """Decay a parameter, apart from the direction, and move it against the direction."""
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.sub_(direction.view_as(p) * group["lr"])


class Adam:
    """Adam's two moments of a tensor, with their corrections counted on the device.

    Args:
        state: Of the optimizer, for a parameter; what is kept goes there.
        like: A tensor of the gradient's shape.
        betas: Decays of both.
        eps: Added to the root of the second.
    """

    def __init__(self, state: dict[str, Any], like: Tensor, betas: tuple[float, float], eps: float) -> None:
        self.state, self.betas, self.eps = state, betas, eps
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=like.dtype, device=like.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(like), torch.zeros_like(like)

    def count(self) -> None:
        self.state["step"] += 1

    def mean(self, gradient: Tensor) -> Tensor:
        """Add a gradient to the first moment, and return it corrected."""
        return self.state["exp_avg"].lerp_(gradient, 1 - self.betas[0]) / (1 - self.betas[0] ** self.state["step"])

    def root(self, gradient: Tensor) -> Tensor:
        """Add a gradient's square to the second moment, and return the root by which Adam divides."""
        second = self.state["exp_avg_sq"].lerp_(gradient.square(), 1 - self.betas[1])
        return (second / (1 - self.betas[1] ** self.state["step"])).sqrt() + self.eps
