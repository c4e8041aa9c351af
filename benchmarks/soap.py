"""SOAP (Vyas et al. 2024, arXiv 2409.11321): Adam in the eigenbases of Shampoo's moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from preconditioned import Adam, Preconditioned, as_matrix, update
from torch import Tensor


class SOAP(Preconditioned):
    """The published optimizer; its first step, as the authors', finds the bases and moves nothing.

    Momentum is kept in the parameter's own coordinates, and only Adam's second moment in the eigenbases: which is the
    same, since a change of coordinates is linear, and leaves nothing to turn when bases change.

    Args:
        params: Parameters.
        lr: Learning rate.
        betas: Adam's; the second is the moments' too.
        eps: Adam's.
        weight_decay: Decoupled.
        refresh: Steps from one change of the bases to the next.
        largest: A side above this size keeps its own coordinates.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        refresh: int = 10,
        largest: int = 2048,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "largest": largest}
        super().__init__(params, defaults, refresh=refresh)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_one(p, as_matrix(p.grad), group)

    def _step_one(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        is_first = not state
        adam = Adam(state, gradient, group["betas"], group["eps"])
        if is_first:
            sizes = gradient.shape if gradient.dim() == 2 else ()
            state["sides"] = [side for side, size in enumerate(sizes) if size <= group["largest"]]
            for side in state["sides"]:
                state[f"moment_{side}"] = gradient.new_zeros(sizes[side], sizes[side])
        else:
            adam.count()
            root = adam.root(_turned(gradient, state))
            update(p, _turned_back(_turned(adam.mean(gradient), state) / root, state), group)
        for side in state["sides"]:
            unfolded = gradient if side == 0 else gradient.t()
            state[f"moment_{side}"].lerp_(unfolded @ unfolded.t(), 1 - group["betas"][1])
        if is_first:
            for side in state["sides"]:
                state[f"basis_{side}"] = torch.linalg.eigh(state[f"moment_{side}"])[1].flip(1).contiguous()

    def refresh(self) -> None:
        """Let the bases follow by one power iteration, in the order of eigenvalues, and the second moment with them."""
        if self.steps == 1:
            return  # the bases are of this step
        for state in self.state.values():
            for side in state["sides"]:
                product = state[f"moment_{side}"] @ state[f"basis_{side}"]
                order = (state[f"basis_{side}"] * product).sum(0).argsort(descending=True)
                state["exp_avg_sq"].copy_(state["exp_avg_sq"].index_select(side, order))
                state[f"basis_{side}"].copy_(torch.linalg.qr(product[:, order])[0])


def _turned(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    """Return a matrix in the eigenbases' coordinates."""
    if 0 in state["sides"]:
        matrix = state["basis_0"].t() @ matrix
    return matrix @ state["basis_1"] if 1 in state["sides"] else matrix


def _turned_back(matrix: Tensor, state: dict[str, Any]) -> Tensor:
    if 0 in state["sides"]:
        matrix = state["basis_0"] @ matrix
    return matrix @ state["basis_1"].t() if 1 in state["sides"] else matrix
