"""Sums over the patches of a convolution, without making patches.

A convolution multiplies its weight with one patch of the image per place of its output. The sum of
these patches is linear in the image and separable: along each dimension, tap ``i`` of the kernel
sees the rows ``p * stride + i * dilation - padding`` for all places ``p``. Counting how often each
row is seen gives a small matrix per dimension, and two or three small products give the sum, with
stride, dilation and every kind of padding exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Window:
    """One dimension of a convolution.

    Attributes:
        kernel: Number of taps.
        stride: Between places of the output.
        dilation: Between taps.
        before: Padding in front.
        after: Padding behind.
        mode: What the padding holds, as ``padding_mode`` of the modules names it.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    mode: str = "zeros"

    def places(self, size: int) -> int:
        """How many places the output has for an input of a size."""
        return (size + self.before + self.after - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def is_plain(self) -> bool:
        """Whether every row of the input is seen once, by the only tap."""
        return self.kernel == self.stride == 1 and self.before == self.after == 0

    def counts(self, size: int, places: int, like: torch.Tensor) -> torch.Tensor:
        """How often each tap sees each row of the input: a matrix of taps and rows."""
        device = like.device
        taps = torch.arange(self.kernel, device=device) * self.dilation - self.before
        seen = taps[:, None] + torch.arange(places, device=device) * self.stride
        rows = torch.arange(size, device=device)
        return (_inside(seen, size, self.mode)[..., None] == rows).sum(1).to(like.dtype)


def _inside(index: torch.Tensor, size: int, mode: str) -> torch.Tensor:
    """Where padding takes its value from; out of range where it is zero."""
    if mode == "circular":
        return index.remainder(size)
    if mode == "replicate":
        return index.clamp(0, size - 1)
    if mode == "reflect":
        index = index.abs()
        return (size - 1) - ((size - 1) - index).abs()
    return index


def patch_sum(image: torch.Tensor, windows: tuple[Window, ...], places: tuple[int, ...] | None = None) -> torch.Tensor:
    """The sum of all patches of an image.

    Args:
        image: Channels, then one dimension per window.
        windows: How patches are taken.
        places: Number of patches along each dimension, if not as many as fit.

    Returns:
        Channels, then the taps of each window.
    """
    for index, window in enumerate(windows):
        axis = index + 1
        size = image.shape[axis]
        if window.is_plain():
            image = image.sum(axis, keepdim=True)
            continue
        count = window.places(size) if places is None else places[index]
        counts = window.counts(size, count, image)
        image = torch.matmul(image.movedim(axis, -1), counts.t()).movedim(-1, axis)
    return image


def windows_of(module: Any) -> tuple[Window, ...]:
    """The windows of a convolution module; those of a transposed one are taken over its output."""
    kernels, strides, dilations = module.kernel_size, module.stride, module.dilation
    windows = []
    for index, (kernel, stride, dilation) in enumerate(zip(kernels, strides, dilations, strict=True)):
        if isinstance(module.padding, str):
            total = dilation * (kernel - 1) if module.padding == "same" else 0
            before, after = total // 2, total - total // 2
        else:
            before = after = module.padding[index]
        windows.append(Window(kernel, stride, dilation, before, after, module.padding_mode))
    return tuple(windows)
