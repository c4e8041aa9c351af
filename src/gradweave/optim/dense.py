"""What K-FAC, FOOF and Shampoo have in common: matrices that are inverted now and then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gradweave.errors import ArgumentError
from gradweave.optim.apply import Target, new_momentum
from gradweave.optim.begun import Begun, Other
from gradweave.optim.family import Layer, VectorOptimizer, parameters_of
from gradweave.optim.rules import LAYER, Manner, sum_of


class DenseOptimizer(VectorOptimizer):
    """An optimizer that keeps matrices per layer, whose inverses it refreshes every so many steps.

    Momentum, weight decay (added to the direction), the first-order rule and the guard against
    gradients that are not finite are the family's. These are baselines: they wait for the device.

    Args:
        model: Whose parameters are updated.
        params: Parameters or groups, if not all of the model's.
        refresh: Steps from one inversion to the next.
        defaults: Hyperparameters.
    """

    def __init__(
        self, model: nn.Module, params: Iterable[Any] | None, *, refresh: int, defaults: dict[str, Any]
    ) -> None:
        if refresh < 1:
            raise ArgumentError("refresh", refresh, "give at least 1")
        self.refresh = refresh
        manner = Manner("dense", trust=LAYER, decoupled=False, momentum_first=False)
        super().__init__(model, parameters_of(model, params), defaults, manner, alone=True)
        if not any(group["rule"] == "vectors" for group in self.param_groups):
            raise ArgumentError("model", type(model).__name__, "has no layer for this method; use torch.optim.AdamW")

    def find_dense(self, layer: Layer, *, fresh: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The direction of a weight and of its bias; with new inverses if ``fresh``."""
        raise NotImplementedError

    def scale_of(self, layers: list[Layer], agreements: list[torch.Tensor]) -> torch.Tensor:
        """The scale of all directions, given P·G of each layer."""
        raise NotImplementedError

    def begin_refresh(self, layers: list[Layer]) -> None:
        """Before directions are found: which layers are to have new inverses."""

    def after_step(self, *, next_is_fresh: bool) -> None:
        """Told whether the next step inverts anew."""

    def prepare_layer(self, layer: Layer) -> None:
        """Makes momentum."""
        for p, state in ((layer.weight, layer.state), (layer.bias, layer.bias_state)):
            if p is not None and state is not None and "momentum_buffer" not in state:
                state["momentum_buffer"] = new_momentum(p)
                state["steps"] = 0

    def _begin(self, layers: list[Layer], others: list[Other]) -> Begun:
        grads = [g for layer in layers for g in (layer.grad, layer.bias_grad) if g is not None]
        grads += [p.grad for p, _ in others if p.grad is not None]
        keep = self._may_step([torch.linalg.vector_norm(grad) for grad in grads])
        if not bool(keep):
            self.after_step(next_is_fresh=True)
            return Begun([], [], keep, 1.0, self.manner)
        inverse = self._inverse_scale(keep.device)
        fresh_layers = [layer for layer in layers if layer.state["steps"] % self.refresh == 0]
        self.begin_refresh(fresh_layers)
        targets: list[Target] = []
        agreements = []
        for layer in layers:
            factor = -inverse if layer.group["maximize"] else inverse
            layer.grad = layer.grad * factor
            layer.bias_grad = None if layer.bias_grad is None else layer.bias_grad * factor
            fresh = layer.state["steps"] % self.refresh == 0
            weight_part, bias_part = self.find_dense(layer, fresh=fresh)
            layer.state["steps"] += 1
            agreement = (weight_part * layer.grad).sum()
            targets.append(Target(layer.weight, weight_part, layer.state["momentum_buffer"], layer.group, 1.0, 1.0))
            if bias_part is not None and layer.bias is not None and layer.bias_state is not None:
                bias_grad: Any = layer.bias_grad
                agreement = agreement + (bias_part * bias_grad).sum()
                buffer = layer.bias_state["momentum_buffer"]
                targets.append(Target(layer.bias, bias_part, buffer, layer.group, 1.0, 1.0))
            agreements.append(agreement)
        if layers:
            scale = self.scale_of(layers, agreements)
            for target in targets:
                target.scale = scale
        steps = [layer.state["steps"] for layer in layers]
        self.after_step(next_is_fresh=any(count % self.refresh == 0 for count in steps))
        return Begun(targets, self._plain(others), keep, inverse, self.manner)


def kl_scale(layers: list[Layer], agreements: list[torch.Tensor]) -> torch.Tensor:
    """The largest scale, 1 at most, with which lr² times the sum of P·G stays within the clip."""
    changes = [agreement * layer.group["lr"] ** 2 for layer, agreement in zip(layers, agreements, strict=True)]
    total = sum_of(changes).clamp_min(0)
    limited = torch.sqrt(layers[0].group["kl_clip"] / total)
    return torch.where(total > 0, limited, torch.ones_like(total)).clamp_max(1.0)
