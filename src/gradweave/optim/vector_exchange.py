"""Vectors of data-parallel ranks: one flat all-reduce when they are used."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def average_records(records: list[torch.Tensor], process_group: Any) -> None:
    """Averages records over ranks, in place, in one flat message.

    An average and not a sum: output vectors are then what the averaged gradients belong to, and
    input vectors, being divided by the average number of places, are right for unequal batches too.
    """
    if not records or dist.get_world_size(process_group) == 1:
        return
    flat = torch.cat([record.flatten() for record in records])
    dist.all_reduce(flat, group=process_group)
    flat /= dist.get_world_size(process_group)
    for record, part in zip(records, flat.split([record.numel() for record in records]), strict=True):
        record.copy_(part.view(record.shape))
