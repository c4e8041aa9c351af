"""Sums over the patches of a convolution, without making patches.

A convolution multiplies its weight by one patch of the image per place of its output. The sum of these patches is
linear in the image and separable: along each dimension, element ``i`` of the kernel sees the rows
``p * stride + i * dilation - padding`` for all places ``p``. Counting how often it sees each row gives a small matrix
per dimension, and two or three small products give the sum, exactly for every stride, dilation and kind of padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Window:
    """One dimension of a convolution.

    Attributes:
        kernel: Number of the kernel's elements.
        stride: Distance between places of the output.
        dilation: Distance between the kernel's elements.
        before: Padding before the image.
        after: Padding after it.
        mode: The ``padding_mode`` of torch's modules.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    mode: str = "zeros"

    def places(self, size: int) -> int:
        """Return the size of the output for an input of a size."""
        return (size + self.before + self.after - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def is_plain(self) -> bool:
        """Return whether every row of the input is seen once, by the only element of the kernel."""
        return self.kernel == self.stride == 1 and self.before == self.after == 0

    def counts(self, size: int, places: int, like: torch.Tensor) -> torch.Tensor:
        """Return how often each element of the kernel sees each row of the input: a matrix of elements by rows."""
        device = like.device
        offsets = torch.arange(self.kernel, device=device) * self.dilation - self.before
        seen = offsets[:, None] + torch.arange(places, device=device) * self.stride
        rows = torch.arange(size, device=device)
        return (_inside(seen, size, self.mode)[..., None] == rows).sum(1).to(like.dtype)


def _inside(index: torch.Tensor, size: int, mode: str) -> torch.Tensor:
    """Return the row that padding takes its value from; out of range where the value is zero."""
    if mode == "circular":
        return index.remainder(size)
    if mode == "replicate":
        return index.clamp(0, size - 1)
    if mode == "reflect":
        index = index.abs()
        return (size - 1) - ((size - 1) - index).abs()
    return index


def patch_sum(image: torch.Tensor, windows: tuple[Window, ...], places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the sum of all patches of an image: channels, then the elements of each window's kernel.

    Args:
        image: Channels, then one dimension per window.
        windows: The patches, by dimension.
        places: Number of patches along each dimension, if not as many as fit.
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
    """Return the windows of a convolution module; those of a transposed one are over its output."""
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
