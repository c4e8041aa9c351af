"""Buckets of parameters: the unit of an update, and of a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.schedule.buckets import fill, message_buckets

FusionMode = Literal["forward", "backward"]

CPU_BUCKET_BYTES: dict[FusionMode, int] = {"forward": 4 * 2**20, "backward": 64 * 2**20}
"""Least bytes of a bucket on the CPU. In forward about what a core's cache holds, so that the layer finds its new
weights there. In backward each switch of the threads from matrix products to an update and back costs a good part of a
millisecond, so there are few buckets."""
MESSAGE_BYTES = 4 * 2**20
"""Bytes at which a message of gradients is full: small enough for what is needed first not to wait for much else, large
enough for a slow link's latency."""
CUDA_BUCKET_BYTES = 64 * 2**20
"""Least bytes of a bucket on a GPU, for which another update is worth its launches on the host."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters updated by one call.

    Attributes:
        number: Position in the order of use.
        params: Parameters in the order of use.
        groups: The same parameters by the index of their group, in the order of the group.
    """

    number: int
    params: tuple[nn.Parameter, ...]
    groups: dict[int, list[nn.Parameter]]

    @property
    def size(self) -> int:
        """Bytes of the parameters, and so of their gradients."""
        return sum(map(bytes_of, self.params))


def bytes_of(p: nn.Parameter) -> int:
    """Return the bytes of a parameter, and so of its gradient."""
    return p.numel() * p.element_size()


def make_buckets(optimizer: Optimizer, order: Iterable[nn.Parameter], most: int, mode: FusionMode) -> list[Bucket]:
    """Fill buckets with an optimizer's parameters in the given order.

    A bucket is full when it has the least bytes that are worth a separate update and, on a GPU, its share of ``most``
    buckets. It ends before a parameter on another device, too. Parameters that the order leaves out are in no bucket.

    A bucket may end inside a layer, since each parameter has its own update; a message, which is waited for as a whole,
    carries whole layers.

    Args:
        optimizer: The optimizer that updates them.
        order: Parameters in the order of their use.
        most: Greatest number of buckets on a GPU.
        mode: The mode of the fusion, which decides the least bytes on the CPU.
    """
    order = list(dict.fromkeys(order))
    total = sum(map(bytes_of, order))
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    filled: list[list[nn.Parameter]] = []
    for device, run in groupby([p for p in order if id(p) in owned], lambda p: p.device):
        limit = CPU_BUCKET_BYTES[mode] if device.type == "cpu" else max(CUDA_BUCKET_BYTES, total // most)
        filled += fill(run, bytes_of, limit)
    return with_groups(optimizer, filled)


def with_groups(optimizer: Optimizer, buckets: Iterable[Sequence[nn.Parameter]]) -> list[Bucket]:
    """Return buckets restricted to an optimizer's parameters, without those that are empty then."""
    place = {
        id(p): (index, position)
        for index, group in enumerate(optimizer.param_groups)
        for position, p in enumerate(group["params"])
    }
    made: list[Bucket] = []
    for params in buckets:
        own = [p for p in params if id(p) in place]
        groups: dict[int, list[nn.Parameter]] = {}
        for p in sorted(own, key=lambda p: place[id(p)]):
            groups.setdefault(place[id(p)][0], []).append(p)
        if own:
            made.append(Bucket(len(made), tuple(own), groups))
    return made


def params_by_layer(model: nn.Module, params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters by the module that has them, in the model's order; those that no module has come last, alone.

    A parameter that several modules have is the first one's.
    """
    left = dict.fromkeys(params)
    layers: list[list[nn.Parameter]] = []
    for module in model.modules():
        own = [p for p in dict.fromkeys(module.parameters(recurse=False)) if p in left]
        for p in own:
            del left[p]
        layers += [own] if own else []
    return [*layers, *([p] for p in left)]


def message_params(layers: Sequence[Sequence[nn.Parameter]], k: int, limit: int) -> list[list[nn.Parameter]]:
    """Return the parameters of each message of gradients, in the order of sending.

    A message carries whole layers, as in the simulator. It is divided only where its parameters differ in dtype or
    device, since it is one flat tensor.

    Args:
        layers: Parameters of each layer, in the order of the forward.
        k: Number of first layers whose gradients are held back, and sent first layer first.
        limit: Bytes at which a message is full.
    """
    numbers = range(len(layers))
    sizes = [sum(map(bytes_of, params)) for params in layers]
    made: list[list[nn.Parameter]] = []
    for bucket in message_buckets(numbers, k, sizes.__getitem__, limit):
        alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for number in bucket:
            # Backward computes the gradients of a layer's last parameters first. Messages that are held back are sent
            # for the next forward, which uses the first parameters first.
            for p in layers[number] if number < k else reversed(layers[number]):
                alike.setdefault((p.dtype, p.device), []).append(p)
        made += alike.values()
    return made


def same_groups(optimizer: Optimizer, known: Sequence[Sequence[nn.Parameter]]) -> bool:
    """Return whether an optimizer's groups have exactly the known parameters."""
    groups = optimizer.param_groups
    if len(groups) != len(known):
        return False
    return all(same_objects(group["params"], params) for group, params in zip(groups, known, strict=True))


def same_objects(one: Sequence[object], other: Sequence[object]) -> bool:
    """Return whether two lists have the same objects; ``==`` of parameters would compare their values."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def mark_written(params: Iterable[nn.Parameter]) -> None:
    """Tell autograd that parameters were written, so that a backward that needs their old values raises.

    Compiled and fused kernels write to memory without incrementing its version.
    """
    torch.autograd.graph.increment_version(list(params))
