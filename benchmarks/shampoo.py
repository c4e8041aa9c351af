"""Shampoo (Gupta, Koren and Singer 2018) with Adam's grafting, as Shi et al. run it (2023, arXiv 2309.06497).

The direction is that of the averaged gradient between inverse roots of the sides' averaged second moments; its length
is that of the step that Adam would take. Vectors take Adam's step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from preconditioned import Adam, Preconditioned, as_matrix, update
from torch import Tensor


class Shampoo(Preconditioned):
    """Grafted Shampoo.

    Args:
        params: Parameters.
        lr: Learning rate, which means what Adam's means.
        betas: Adam's, the first of them for the direction too.
        shampoo_beta: Decay of the sides' moments.
        eps: Adam's.
        root_eps: Added to the moments' eigenvalues.
        weight_decay: Decoupled.
        refresh: Steps from one root to the next.
        largest: A side above this size is left alone.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        shampoo_beta: float = 0.99,
        eps: float = 1e-8,
        root_eps: float = 1e-12,
        weight_decay: float = 0.0,
        refresh: int = 10,
        largest: int = 2048,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "shampoo_beta": shampoo_beta, "eps": eps, "root_eps": root_eps,
            "weight_decay": weight_decay, "largest": largest,
        }  # fmt: skip
        super().__init__(params, defaults, refresh=refresh)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update(p, self._direction(p, as_matrix(p.grad), group), group)

    def _direction(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[p]
        adam = Adam(state, gradient, group["betas"], group["eps"])
        adam.count()
        mean = adam.mean(gradient)
        grafted = mean / adam.root(gradient)
        if "sides" not in state:
            sizes = gradient.shape if gradient.dim() == 2 else ()
            state["sides"] = [side for side, size in enumerate(sizes) if size <= group["largest"]]
            for side in state["sides"]:
                state[f"moment_{side}"] = gradient.new_zeros(sizes[side], sizes[side])
                state[f"root_{side}"] = torch.eye(sizes[side], dtype=gradient.dtype, device=gradient.device)
        if not state["sides"]:
            return grafted
        direction = mean
        for side in state["sides"]:
            unfolded = gradient if side == 0 else gradient.t()
            state[f"moment_{side}"].lerp_(unfolded @ unfolded.t(), 1 - group["shampoo_beta"])
            root = state[f"root_{side}"]
            direction = root @ direction if side == 0 else direction @ root
        length = torch.linalg.vector_norm(direction)
        size = torch.linalg.vector_norm(grafted) / torch.where(length > 0, length, torch.ones_like(length))
        return direction * size

    def refresh(self) -> None:
        """Take the roots of the moments, corrected for having begun at zero."""
        for group in self.param_groups:
            for state in (self.state[p] for p in group["params"]):
                for side in state.get("sides", ()):
                    moment = state[f"moment_{side}"] / (1 - group["shampoo_beta"] ** state["step"])
                    state[f"root_{side}"].copy_(_root(moment, -1 / (2 * len(state["sides"])), group["root_eps"]))


def _root(moment: Tensor, power: float, eps: float) -> Tensor:
    """Return a power of a matrix, whose eigenvalues rounding may have made negative."""
    values, vectors = torch.linalg.eigh(moment.double())
    values = values - values.min().clamp_max(0) + eps
    return (vectors * values**power @ vectors.t()).to(moment.dtype)
