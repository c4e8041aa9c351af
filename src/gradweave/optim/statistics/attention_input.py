"""Vectors of the input projection of ``nn.MultiheadAttention``, which is no module that could have hooks.

It is three matrices, for queries, keys and values, whose input vectors are the means of what the module is
called with; their output vectors, where they are caught, are the gradients of its bias. What the output
projection is applied to cannot be seen from outside: see :mod:`gradweave.optim.statistics.attention_output`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradweave.optim.kernels.gpu_statistics import GpuStatistics
from gradweave.optim.statistics.geometry import LINEAR, Layout
from gradweave.optim.statistics.hooks import Catching, Masking, Tap


class AttentionTap(Tap):
    """The hook of an attention module's input projection."""

    by_kernels = False

    def __init__(
        self, weight: nn.Parameter, catching: Catching, masking: Masking, gpu_statistics: GpuStatistics
    ) -> None:
        width = weight.shape[1]
        super().__init__(Layout(LINEAR, 3, width, width), weight, catching, masking, gpu_statistics)
        self.with_outputs = False
        self._one = Layout(LINEAR, 1, width, width)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> Any:
        """Behind the module's forward, whose first result passes through."""
        passed = super().__call__(module, (self._inputs(args, kwargs),), {}, y[0])
        return None if passed is None else (passed, *y[1:])

    def weight_of(self, module: nn.Module) -> torch.Tensor:
        """The weight of the projection."""
        return module.in_proj_weight  # type: ignore[return-value]

    def input_sums(self, x: Any) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Sums of queries, keys and values, as if there were as many of each as there are queries."""
        samples, mask = self.catching.input_samples, self.masking.mask
        sums, count = self._one.input_sums(x[0].detach(), samples, mask)
        parts = [sums]
        for other in x[1:]:
            if other is x[0]:
                parts.append(sums)
                continue
            more, places = self._one.input_sums(other.detach(), samples, mask)
            parts.append(more * _ratio(count, places))
        return torch.cat(parts), count

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        return given["query"], given["key"], given["value"]


def _ratio(count: float | torch.Tensor, places: float | torch.Tensor) -> float | torch.Tensor:
    """How many of one there are for each of another; 0 where there is no other."""
    if isinstance(places, torch.Tensor):
        divisor = torch.where(places > 0, places, torch.ones_like(places))
        return torch.where(places > 0, count / divisor, torch.zeros_like(places))
    return count / places if places else 0.0


def attention_parts(module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None] | None:
    """The weight and the bias of an attention module's joint input projection, if it has one."""
    if not isinstance(module, nn.MultiheadAttention) or type(module).forward is not nn.MultiheadAttention.forward:
        return None
    own = dict(module.named_parameters(recurse=False))
    weight = own.get("in_proj_weight")
    return None if weight is None else (weight, own.get("in_proj_bias"))
