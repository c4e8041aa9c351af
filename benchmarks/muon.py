"""Muon (Jordan et al. 2024) as ``torch.optim.Muon`` computes it, in a form that a CUDA graph can hold.

Torch's reads its learning rate on the host and takes one matrix after the other. Here matrices of one shape are
orthogonalized together, and convolutions count as matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from preconditioned import Preconditioned, as_matrix, update
from torch import Tensor

COEFFICIENTS = (3.4445, -4.775, 2.0315)


class Muon(Preconditioned):
    """The published optimizer, for matrices and convolutions.

    Args:
        params: Parameters of two and more dimensions.
        lr: Learning rate.
        momentum: Nesterov's.
        weight_decay: Decoupled.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float | Tensor = 1e-2, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, refresh=1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            alike: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    gradient = as_matrix(p.grad)
                    buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(gradient))
                    buffer.lerp_(gradient, 1 - group["momentum"])
                    alike[gradient.shape].append((p, gradient.lerp(buffer, group["momentum"])))
            for (rows, columns), members in alike.items():
                made = orthogonalized(torch.stack([ahead for _, ahead in members])) * max(1, rows / columns) ** 0.5
                for (p, _), direction in zip(members, made.to(members[0][0].dtype), strict=True):
                    update(p, direction, group)


def orthogonalized(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return matrices with singular values near one, by Newton and Schulz in bfloat16."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
