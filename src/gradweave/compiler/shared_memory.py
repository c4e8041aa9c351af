"""Tensors that share memory: what is right for each of them by itself may be wrong for both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from gradweave._compat.eager import memory_of


class Sharing:
    """Which of some tensors share memory, and how, when this is made."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._addresses = [x.data_ptr() for x in tensors]
        self._groups = groups_of(tensors)

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it is so with these, which have taken their places."""
        addresses = [x.data_ptr() for x in tensors]
        if addresses != self._addresses:
            if groups_of(tensors) != self._groups:
                return False
            self._addresses = addresses
        return True


def groups_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Of those that share memory: which they are, and where each begins."""
    by_memory: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, x in enumerate(tensors):
        if x.layout is torch.strided and x.numel():
            by_memory[memory_of(x)].append((index, int(x.storage_offset())))
    return [members for members in by_memory.values() if len(members) > 1]


def contents_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """A number for each tensor that is another one, almost surely, once the tensor has been changed."""
    with torch.no_grad():
        sums = [_sum_of_bytes(x.detach()) for x in tensors if x.layout is torch.strided and x.numel()]
    return [int(x) for x in sums]


def _sum_of_bytes(x: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(x) if x.is_complex() else x
    if real.dtype is torch.bool or not real.is_floating_point():
        return real.sum(dtype=torch.int64)
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return real.view(widths[real.element_size()]).sum(dtype=torch.int64)
