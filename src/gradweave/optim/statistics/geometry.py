"""Layers as matrices, and the sums over places that their vectors are made of.

A layer is seen as ``groups`` matrices of ``outputs`` by ``inputs`` that are applied at many places (samples, positions,
patches). Its input vector is the mean of the matrices' inputs over places; its output vector that of the gradients of
their results. The one that belongs to a bias is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from gradweave._compat.modules import ConvolutionModule
from gradweave.optim.state import wide_dtype
from gradweave.optim.statistics.patches import Window, patch_sum, windows_of

Kind = Literal["linear", "convolution", "transposed"]
LINEAR: Literal["linear"] = "linear"
CONVOLUTION: Literal["convolution"] = "convolution"
TRANSPOSED: Literal["transposed"] = "transposed"

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Layout:
    """A layer as matrices.

    Attributes:
        kind: The kind of the layer.
        groups: Number of matrices.
        inputs: Their columns.
        outputs: Their rows.
        windows: A convolution's patches, by dimension; empty for a linear layer.
    """

    kind: Kind
    groups: int
    inputs: int
    outputs: int
    windows: tuple[Window, ...] = ()

    @property
    def takes_bias(self) -> bool:
        """Whether a bias is one more column of the matrices; it is not where outputs overlap."""
        return self.kind != TRANSPOSED

    @property
    def columns_first(self) -> bool:
        """Whether the weight is stored transposed."""
        return self.kind == TRANSPOSED

    def input_sums(
        self, x: torch.Tensor, samples: int | None, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Return the sums over the places of the first samples, and the number of places.

        Args:
            x: The layer's input.
            samples: Number of leading samples (all if None).
            mask: Which rows of a linear layer count.
        """
        x = self._batched(x)
        dtype = wide_dtype(x)
        if self.kind == LINEAR:
            mask, x = _fitting(mask, x, samples), x[:samples]
            if mask is not None:
                return _sum_rows(_masked(x, mask, dtype), self.inputs, dtype), mask.to(dtype).sum()
            return _sum_rows(x, self.inputs, dtype), float(x.numel() // self.inputs)
        x = x[:samples]
        if self.kind == TRANSPOSED:
            return x.sum((0, *range(2, x.dim())), dtype=dtype), float(x.numel() // x.shape[1])
        count = len(x)
        for window, size in zip(self.windows, x.shape[2:], strict=True):
            count *= window.places(size)
        if all(window.is_plain() for window in self.windows):
            return x.sum((0, *range(2, x.dim())), dtype=dtype), float(count)
        return patch_sum(x.sum(0, dtype=dtype), self.windows).flatten(), float(count)

    def output_sums(
        self, gradient: torch.Tensor, samples: int | None, places: tuple[int, ...], mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sums of the output's gradient over the same places.

        Args:
            gradient: The output's gradient.
            samples: Number of leading samples (all if None).
            places: The input's spatial size, which is the number of a transposed convolution's patches.
            mask: Which rows of a linear layer count.
        """
        gradient = self._batched(gradient)
        dtype = wide_dtype(gradient)
        if self.kind == LINEAR:
            mask, gradient = _fitting(mask, gradient, samples), gradient[:samples]
            if mask is not None:
                gradient = _masked(gradient, mask, dtype)
            return _sum_rows(gradient, self.outputs, dtype)
        gradient = gradient[:samples]
        if self.kind == TRANSPOSED:
            return patch_sum(gradient.sum(0, dtype=dtype), self.windows, places).flatten()
        return gradient.sum((0, *range(2, gradient.dim())), dtype=dtype)

    def _batched(self, x: torch.Tensor) -> torch.Tensor:
        lowest = 2 + len(self.windows)
        return x.unsqueeze(0) if x.dim() < lowest else x

    def batch_size(self, x: torch.Tensor) -> int:
        """Return the number of samples in an input or an output."""
        return int(self._batched(x).shape[0])


def _sum_rows(x: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    return x.reshape(-1, width).sum(0, dtype=dtype)


def _masked(x: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows times their weights; rows of weight 0 may hold anything, such as NaN."""
    weights = mask.to(dtype)[..., None]
    return torch.where(weights != 0, x.to(dtype) * weights, torch.zeros((), dtype=dtype, device=x.device))


def _fitting(mask: torch.Tensor | None, x: torch.Tensor, samples: int | None) -> torch.Tensor | None:
    """Return a mask if it has one entry per row; layers after a pooling have other rows."""
    return None if mask is None or mask.shape != x.shape[:-1] else mask[:samples]


def layout_of(module: nn.Module) -> Layout | None:
    """Return the layout of a layer whose forward is torch's own, and None for any other module."""
    if isinstance(module, torch.jit.ScriptModule):
        return None  # its forward is not Python's, and cannot be compared
    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return Layout(LINEAR, 1, module.in_features, module.out_features)
    if not isinstance(module, ConvolutionModule):
        return None
    groups = module.groups
    elements = 1
    for size in module.kernel_size:
        elements *= size
    inputs, outputs = module.in_channels // groups, module.out_channels // groups
    if any(isinstance(module, kind) and forward is kind.forward for kind in _CONVOLUTIONS):
        return Layout(CONVOLUTION, groups, inputs * elements, outputs, windows_of(module))
    if any(isinstance(module, kind) and forward is kind.forward for kind in _TRANSPOSED):
        return Layout(TRANSPOSED, groups, inputs, outputs * elements, windows_of(module))
    return None
