"""Buckets: parameters that are updated together, in the order they are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

CPU_BUCKET_BYTES = {"forward": 4 * 2**20, "backward": 64 * 2**20}
"""In forward about what a core's cache holds: the layer finds its new weights there. In backward each change from
matrix products to an update and back costs the threads a good part of a millisecond, so there are few."""
CUDA_BUCKET_BYTES = 64 * 2**20
"""Least bytes for which the host's part of an update is worth paying once more."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters updated by one call.

    Attributes:
        number: Its place in the order of use.
        params: In the order of use.
        groups: The same by index of their parameter group, in the order of the group.
    """

    number: int
    params: tuple[nn.Parameter, ...]
    groups: dict[int, list[nn.Parameter]]

    @property
    def size(self) -> int:
        """Bytes of its parameters, and so of its gradients."""
        return sum(p.numel() * p.element_size() for p in self.params)


def make_buckets(optimizer: Optimizer, order: Iterable[nn.Parameter], most: int, mode: str) -> list[Bucket]:
    """Fills buckets with an optimizer's parameters in the given order.

    A bucket is closed when it holds the least bytes that are worth an update of their own and, on
    a GPU, its share of ``most`` buckets; and before a parameter on another device. Parameters that
    the order leaves out are in no bucket.

    Args:
        optimizer: Whose parameters.
        order: Of their use.
        most: How many buckets on a GPU.
        mode: ``"forward"`` or ``"backward"``.
    """
    order = list(dict.fromkeys(order))
    total = sum(p.numel() * p.element_size() for p in order)
    place = {
        p: (index, position)
        for index, group in enumerate(optimizer.param_groups)
        for position, p in enumerate(group["params"])
    }
    buckets: list[Bucket] = []
    filling: list[nn.Parameter] = []
    size = 0

    def close() -> None:
        nonlocal filling, size
        if filling:
            groups: dict[int, list[nn.Parameter]] = {}
            for p in sorted(filling, key=place.__getitem__):
                groups.setdefault(place[p][0], []).append(p)
            buckets.append(Bucket(len(buckets), tuple(filling), groups))
        filling, size = [], 0

    for p in order:
        if p not in place:
            continue
        if filling and filling[-1].device != p.device:
            close()
        filling.append(p)
        size += p.numel() * p.element_size()
        on_cpu = p.device.type == "cpu"
        if size >= (CPU_BUCKET_BYTES[mode] if on_cpu else max(CUDA_BUCKET_BYTES, total // most)):
            close()
    close()
    return buckets


def same_groups(optimizer: Optimizer, known: Sequence[Sequence[nn.Parameter]]) -> bool:
    """Whether an optimizer's groups hold the parameters they held."""
    groups = optimizer.param_groups
    if len(groups) != len(known):
        return False
    return all(same_objects(group["params"], params) for group, params in zip(groups, known, strict=True))


def same_objects(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether two lists hold the same objects; comparing parameters would compare their values."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def mark_written(params: Iterable[nn.Parameter]) -> None:
    """Tell autograd that parameters changed, so that a backward through their old values raises.

    Compiled and fused kernels write to memory without telling it.
    """
    torch.autograd.graph.increment_version(list(params))
