"""Eva-s: vectors of the gradient itself, for tensors of any shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gradweave.errors import UnsupportedError
from gradweave.optim.base import Layer, VectorOptimizer, parameters_of
from gradweave.optim.hyperparameters import Hyperparameters, Mode, Preset, with_shared_arguments
from gradweave.optim.rules import (
    AUTHORS,
    GRADIENT_NORM,
    JOINT,
    KL_CLIP,
    LAYER,
    TWO_SIDED,
    Direction,
    Number,
    UpdateRule,
    direction,
    ratio,
)
from gradweave.optim.state import VECTORS, FirstOrderRule, new_momentum, wide_dtype
from gradweave.optim.update import is_plain

OURS = Preset(lr=0.01, damping=0.3, running_average=0.1, first_order="adamw")


@with_shared_arguments()
class EvaS(VectorOptimizer):
    """Eva-s: a vector per mode of a gradient, its mean over the other modes, instead of Shampoo's matrices.

    Needs no hooks, and covers every tensor of two or more dimensions. By default a tensor is a matrix of its first
    dimension by all others, each side is damped by itself, and the vectors are running averages; the authors take one
    vector per dimension, and their code sums the vectors up over all steps, without ``running_average``.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        lr: float | torch.Tensor | None = None,
        damping: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        running_average: float | None = None,
        kl_clip: float = 0.001,
        first_order: FirstOrderRule | None = None,
        first_order_lr: float | None = None,
        first_order_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        faithful: bool = False,
        reference: bool = False,
    ) -> None:
        mode = Mode.of(faithful=faithful, reference=reference)
        given = Hyperparameters(
            lr=lr,
            damping=damping,
            momentum=momentum,
            weight_decay=weight_decay,
            running_average=running_average,
            kl_clip=kl_clip,
            first_order=first_order,
            first_order_lr=first_order_lr,
            first_order_weight_decay=first_order_weight_decay,
            betas=betas,
            eps=eps,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
        )
        rules = {
            Mode.OURS: UpdateRule(TWO_SIDED, trust=LAYER, momentum_first=False),
            Mode.FAITHFUL: UpdateRule(JOINT, **AUTHORS, divided=True, trust=KL_CLIP),
            Mode.REFERENCE: UpdateRule(JOINT, **AUTHORS, trust=GRADIENT_NORM, nesterov_twice=True),
        }
        self._sums_up = mode is Mode.REFERENCE
        self._is_matrix = mode is Mode.OURS
        super().__init__(model, parameters_of(model, params), given.defaults(mode, OURS), rules[mode])
        if self._part is None and not any(group["rule"] == VECTORS for group in self.param_groups):
            raise UnsupportedError(type(model).__name__, "it has no matrix to train", "use torch.optim.AdamW")
        self._enlist()

    def covered(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return every tensor of two or more dimensions that is not empty."""
        return [p for p in params if p.dim() >= 2 and p.numel()]

    def prepare_layer(self, layer: Layer) -> None:
        """Create momentum and vectors."""
        weight, state = layer.weight, layer.state
        self.prepare_size(layer)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = new_momentum(weight)
            size = sum(self._modes(weight))
            state["mode_vectors"] = torch.zeros(size, dtype=wide_dtype(weight), device=weight.device)

    def find_direction(
        self, layer: Layer, gradient_square: torch.Tensor, factor: Number, keep: torch.Tensor
    ) -> Direction:
        """Blend the gradient's means into the running vectors, and return the direction."""
        running = layer.state["mode_vectors"]
        modes = self._modes(layer.weight)
        gradient = layer.grad.to(running.dtype).reshape(modes) * factor
        dims = range(len(modes))
        means = torch.cat([gradient.mean([other for other in dims if other != one]) for one in dims])
        if self._sums_up:
            blended = running + means
        else:
            weight = layer.group["running_average"]
            blended = torch.where((running != 0).any(), running + (means - running) * weight, means)
        running.copy_(torch.where(keep, blended, running))
        first, *others = running.split(modes)
        inputs = others[0]
        for vector in others[1:]:
            inputs = (inputs[:, None] * vector).flatten()
        if self.update_rule.relative:
            # Their length does not matter, and products with them could leave the range of float32.
            inputs, first = _unit(inputs), _unit(first)
        matrix = gradient.reshape(1, modes[0], -1)
        plain = is_plain(layer.group)
        damping = layer.group["damping"]
        return direction(
            self.update_rule, damping, matrix, None, gradient_square, inputs[None], first[None], pointwise=plain
        )

    def _modes(self, weight: torch.Tensor) -> list[int]:
        """Return the shape as which a weight is preconditioned."""
        if self._is_matrix:
            return [weight.shape[0], weight.numel() // weight.shape[0]]
        return list(weight.shape)


def _unit(vector: torch.Tensor) -> torch.Tensor:
    """Return a vector of length one; zeros for a vector of zeros, or one too small to be normalized."""
    largest = vector.abs().amax()
    largest = torch.where(largest >= 4 * torch.finfo(vector.dtype).tiny, largest, torch.zeros_like(largest))
    vector = vector * ratio(torch.ones_like(largest), largest)
    return vector * ratio(torch.ones_like(largest), vector.square().sum().sqrt())
