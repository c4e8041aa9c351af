"""K-FAC (Martens and Grosse 2015; convolutions as Grosse and Martens 2016) and FOOF (Benzing 2022)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import nn

from gradweave.optim.dense import DenseOptimizer, kl_scale
from gradweave.optim.exchange import add_up
from gradweave.optim.family import Layer, loss_scale
from gradweave.optim.moments import MomentCapture, Moments, MomentTap
from gradweave.optim.ranks import DEFAULT, Alike, Ranks


class _Moments(DenseOptimizer):
    """Layers with moments; state of a weight: running ``inputs`` and ``outputs``, and their inverses."""

    outputs: bool

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        *,
        lr: float | torch.Tensor = 0.01,
        damping: float = 0.03,
        refresh: int = 10,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        running_average: float = 0.05,
        kl_clip: float = 0.001,
        first_order: str = "sgd",
        first_order_lr: float | None = None,
        maximize: bool = False,
        process_group: Any = DEFAULT,
    ) -> None:
        self.ranks = Ranks(model, process_group)
        self._alike = Alike(type(self).__name__, model)
        self._moments: dict[int, Moments] = {}
        self._capture = MomentCapture(model, outputs=self.outputs, ranks=self.ranks)
        self._taps: dict[int, MomentTap] = {id(layer.weight): layer.tap for layer in self._capture.layers}
        defaults = {
            "lr": lr, "damping": damping, "momentum": momentum, "weight_decay": weight_decay, "kl_clip": kl_clip,
            "running_average": running_average, "first_order": first_order, "first_order_lr": first_order_lr,
            "first_order_weight_decay": weight_decay, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": maximize,
            "foreach": None, "rule": None,
        }  # fmt: skip
        try:
            super().__init__(model, params, refresh=refresh, defaults=defaults)
        except BaseException:
            self._capture.remove()
            raise
        finalize(self, self._capture.remove).atexit = False

    def covered(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Weights of layers with hooks, each followed by its bias; both must be given."""
        given = set(map(id, params))
        chosen: list[torch.Tensor] = []
        for layer in self._capture.layers:
            parts = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
            if all(id(p) in given for p in parts):
                chosen += parts
        return chosen

    def scale_of(self, layers: list[Layer], agreements: list[torch.Tensor]) -> torch.Tensor:
        """K-FAC's limit of the change in the network's output."""
        return kl_scale(layers, agreements)

    def after_step(self, *, next_is_fresh: bool) -> None:
        """Moments are caught in the steps that use them only."""
        for tap in self._taps.values():
            tap.clear()
            tap.wanted = next_is_fresh

    def begin_refresh(self, layers: list[Layer]) -> None:
        """Adds moments up over data-parallel ranks."""
        self._moments = {id(layer.weight): self._taps[id(layer.weight)].caught(layer.weight) for layer in layers}
        group = None if self.ranks is None else self.ranks.group()
        if self.ranks is None or group is None or not layers or dist.get_world_size(group) == 1:
            return
        message = [x for moments in self._moments.values() for x in moments.tensors]
        if self.ranks.lender is None:
            self._alike.check(group, [p for own in self.param_groups for p in own["params"]], message)
        add_up(message, group)

    def find_dense(self, layer: Layer, *, fresh: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Blends moments and inverts them if it is time, and multiplies from one or both sides."""
        state = layer.state
        moments = self._moments.pop(id(layer.weight), None) if fresh else None
        places, samples = (0.0, 0.0) if moments is None else moments.counts.tolist()
        if moments is not None and places > 0:
            weight = layer.group["running_average"]
            _blend(state, "inputs", moments.inputs / (samples if self.outputs else places), weight)
            if moments.outputs is not None:
                unscaled = float(loss_scale(self)) ** -2
                _blend(state, "outputs", moments.outputs * (unscaled / places), weight)
            self.invert(state, layer.group["damping"])
        matrix = layer.grad.reshape(len(layer.grad), -1)
        if layer.bias_grad is not None:
            matrix = torch.cat((matrix, layer.bias_grad[:, None]), 1)
        if "inputs_inverse" in state:
            matrix = matrix.to(state["inputs_inverse"].dtype) @ state["inputs_inverse"]
            if "outputs_inverse" in state:
                matrix = state["outputs_inverse"] @ matrix
        matrix = matrix.to(layer.grad.dtype)
        if layer.bias_grad is None:
            return matrix.view(layer.grad.shape), None
        return matrix[:, :-1].reshape(layer.grad.shape), matrix[:, -1]

    def invert(self, state: dict[str, Any], damping: float) -> None:
        """Makes the inverses anew."""
        raise NotImplementedError


class KFAC(_Moments):
    """K-FAC: the inverse of the moments of inputs and of outputs' gradients, with factored damping.

    ``P = (B + sqrt(damping) / pi)⁻¹ G (A + sqrt(damping) pi)⁻¹`` with ``pi² = tr(A) / n · m / tr(B)``,
    the empirical Fisher's factors of per-sample gradients of a mean loss, and K-FAC's clip.
    """

    outputs = True

    def invert(self, state: dict[str, Any], damping: float) -> None:
        """Both factors."""
        inputs, outputs = state["inputs"], state["outputs"]
        ratio = (inputs.trace() / len(inputs)) / (outputs.trace() / len(outputs)).clamp_min(1e-30)
        pi = ratio.clamp(1e-12, 1e12).sqrt()
        state["inputs_inverse"] = _damped_inverse(inputs, pi * damping**0.5)
        state["outputs_inverse"] = _damped_inverse(outputs, damping**0.5 / pi)


class FOOF(_Moments):
    """FOOF: ``P = G (A + damping)⁻¹`` with the moments of inputs alone, and K-FAC's clip."""

    outputs = False

    def invert(self, state: dict[str, Any], damping: float) -> None:
        """The one factor."""
        state["inputs_inverse"] = _damped_inverse(state["inputs"], torch.as_tensor(damping))


def _blend(state: dict[str, Any], key: str, new: torch.Tensor, weight: float) -> None:
    if key in state:
        state[key].lerp_(new, weight)
    else:
        state[key] = new.clone()


def _damped_inverse(matrix: torch.Tensor, damping: torch.Tensor) -> torch.Tensor:
    """The inverse of a moment with damping: at least as much as rounding may have taken off its eigenvalues."""
    rounding = len(matrix) * torch.finfo(matrix.dtype).eps * matrix.diagonal().max()
    identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    factor = torch.linalg.cholesky(matrix + torch.maximum(damping.to(matrix), rounding) * identity)
    return torch.cholesky_inverse(factor)
