"""Messages of gradients between replicas, averaged all at once: what a step sends that is not one graph.

A message is one flat tensor of some parameters' gradients, each in the order of its memory, and a flag for each that
says whether a rank has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from gradweave._runtime.peers.replica_messages import naming_lost_peers
from gradweave.errors import UnsupportedError


def real_numbers(tensor: torch.Tensor) -> list[float]:
    """Return numbers that have travelled with gradients, which may be complex."""
    numbers: list[float] = (tensor.real if tensor.is_complex() else tensor).tolist()
    return numbers


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as a flat one, in the order of its memory: a view, unless there are gaps."""
    order = _dimensions_by_stride(tensor)
    return tensor.reshape(-1) if order is None else tensor.permute(order).view(-1)


def laid_out_like(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of a flat tensor that :func:`in_memory_order` has made of a tensor like another one."""
    order = _dimensions_by_stride(like)
    if order is None:
        return flat.view(like.shape)
    place = [order.index(dimension) for dimension in range(like.dim())]
    return flat.view([like.shape[dimension] for dimension in order]).permute(place)


def _dimensions_by_stride(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions in the order in which a dense tensor lies in memory; None if there are gaps."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: (-strides[dimension], dimension))
    return order if tensor.permute(order).is_contiguous() else None


class GradientMessages:
    """Averages over ranks of the gradients of parameters, with the results of DistributedDataParallel.

    Args:
        messages: Parameters of each message, in the order of sending, alike in dtype and device; the same on all ranks.
        group: The ranks.
        dtype: Dtype in which gradients travel; None for their own.
    """

    def __init__(
        self, messages: Sequence[Sequence[nn.Parameter]], group: dist.ProcessGroup, dtype: torch.dtype | None = None
    ) -> None:
        self.messages = tuple(map(tuple, messages))
        self._group = group
        self._dtype = dtype
        self._share = 1.0 / dist.get_world_size(group)

    def average(self, signals: Sequence[float] = ()) -> tuple[list[nn.Parameter], list[float]]:
        """Put averages in the place of all gradients.

        A gradient that this rank lacks, and another one has, counts as zero; one that no rank has stays None.

        Args:
            signals: Numbers that travel at the end of the first message, and are summed up.

        Returns:
            The parameters that no rank has a gradient of, and the sums of the signals.
        """
        sums: list[float] = []
        with torch.no_grad(), naming_lost_peers("gradients could not be averaged"):
            wires = [self._wire(params, () if n else signals) for n, params in enumerate(self.messages)]
            works = [dist.all_reduce(wire, group=self._group, async_op=True) for wire in wires]
            unused = []
            for number, (params, wire, work) in enumerate(zip(self.messages, wires, works, strict=True)):
                work.wait()
                *pieces, flags = wire[: len(wire) - (0 if number else len(signals))].split(_sizes(params))
                if not number and signals:
                    sums = real_numbers(wire[-len(signals) :])
                for p, piece, count in zip(params, pieces, flags.tolist(), strict=True):
                    if count == 0:
                        p.grad = None
                        unused.append(p)
                    elif p.grad is None:
                        p.grad = laid_out_like(piece, p).to(p.dtype, copy=True)
                    else:
                        p.grad.copy_(laid_out_like(piece, p))
            return unused, sums

    def _wire(self, params: Sequence[nn.Parameter], signals: Sequence[float]) -> torch.Tensor:
        first = params[0]
        wire = first.new_zeros(sum(_sizes(params)) + len(signals), dtype=self._dtype or first.dtype)
        *pieces, flags = wire[: len(wire) - len(signals)].split(_sizes(params))
        if signals:
            wire[-len(signals) :] = torch.tensor(signals, dtype=wire.dtype)
        for place, (p, piece) in enumerate(zip(params, pieces, strict=True)):
            if p.grad is not None:
                if p.grad.layout is not torch.strided:
                    raise UnsupportedError(
                        f"a sparse gradient of shape {tuple(p.grad.shape)}",
                        "it cannot be averaged in a message",
                        "construct the embedding with sparse=False",
                    )
                laid_out_like(piece, p).copy_(p.grad * self._share)
                flags[place] = 1
        return wire


def _sizes(params: Sequence[nn.Parameter]) -> list[int]:
    """Return the elements of each gradient of a message, and of its flags."""
    return [*(p.numel() for p in params), len(params)]
