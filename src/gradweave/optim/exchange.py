"""Vectors and moments of data-parallel ranks: one flat all-reduce when they are used."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def average_records(records: list[torch.Tensor], process_group: Any) -> None:
    """Averages records over ranks, in place.

    An average and not a sum: output vectors are then what the averaged gradients belong to, and
    input vectors, being divided by the average number of places, are right for unequal batches too.
    """
    if not records or dist.get_world_size(process_group) == 1:
        return
    add_up(records, process_group, average=True)


def add_up(tensors: list[torch.Tensor], process_group: Any, *, average: bool = False) -> None:
    """Sums tensors over ranks in one flat message, or averages them, in place."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=process_group)
    if average:
        flat /= dist.get_world_size(process_group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
