"""Weights that several layers share, where these layers are on different ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from gradweave.errors import ArgumentError
from gradweave.pipeline.together import Together


@dataclass(frozen=True)
class Tie:
    """One weight of several ranks.

    Attributes:
        names: All its names in the whole model, in order.
        ranks: Those that have a copy, in order.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]


def find_ties(layers: Sequence[tuple[str, nn.Module]], rank_of_layer: Sequence[int]) -> list[Tie]:
    """The weights that layers of different ranks share.

    Args:
        layers: Of the whole model.
        rank_of_layer: Where each layer is.
    """
    uses: dict[nn.Parameter, list[tuple[str, int]]] = {}
    for (name, layer), rank in zip(layers, rank_of_layer, strict=True):
        for own, p in layer.named_parameters(remove_duplicate=False):
            uses.setdefault(p, []).append((f"{name}.{own}", rank))
    _refuse_shared_buffers(layers, rank_of_layer)
    ties = []
    for places in uses.values():
        ranks = sorted({rank for _, rank in places})
        if len(ranks) > 1:
            ties.append(Tie(tuple(name for name, _ in places), tuple(ranks)))
    return ties


def _refuse_shared_buffers(layers: Sequence[tuple[str, nn.Module]], rank_of_layer: Sequence[int]) -> None:
    """A buffer that layers of two ranks write to would be two, and each would see half of what is written."""
    seen: dict[int, tuple[str, int]] = {}
    for (name, layer), rank in zip(layers, rank_of_layer, strict=True):
        for own, buffer in layer.named_buffers(remove_duplicate=False):
            other, where = seen.setdefault(id(buffer), (f"{name}.{own}", rank))
            if where != rank:
                raise ArgumentError(
                    "model", f"{name}.{own}", f"is the same buffer as {other}, on another rank; give each layer its own"
                )


class TiedGradients:
    """Sums up the gradients of tied weights over the ranks that share them, so that their copies stay alike.

    Args:
        ties: Those of the whole model, the same on all ranks.
        params: Of this rank, by name.
        together: The ranks.
    """

    def __init__(self, ties: Sequence[Tie], params: Mapping[str, nn.Parameter], together: Together) -> None:
        self._together = together
        self._own: list[tuple[Tie, nn.Parameter]] = []
        for tie in ties:
            if together.rank in tie.ranks:
                p = next(params[name] for name in tie.names if name in params)
                self._own.append((tie, p))
        with torch.no_grad():
            for tie, p in self._own:
                self._share(tie, p)

    def counted_elsewhere(self) -> set[nn.Parameter]:
        """Those whose gradient another rank counts in a norm."""
        return {p for tie, p in self._own if tie.ranks[0] != self._together.rank}

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Context of a step: what it adds to the gradients of tied weights is summed up over their ranks."""
        trained = [(tie, p) for tie, p in self._own if p.requires_grad]
        before = [p.grad for _, p in trained]
        for _, p in trained:
            p.grad = None
        try:
            yield
        except BaseException:
            for (_, p), earlier in zip(trained, before, strict=True):
                p.grad = earlier
            raise
        for (tie, p), earlier in zip(trained, before, strict=True):
            own = torch.zeros_like(p) if p.grad is None else p.grad
            grad = self._sum(tie, own.contiguous())
            p.grad = grad if earlier is None else earlier.add_(grad)

    def _share(self, tie: Tie, p: torch.Tensor) -> None:
        """Gives all ranks of a tie the first one's weight: they may have been initialized apart."""
        first, *others = (self._together.global_rank(rank) for rank in tie.ranks)
        copy = p.detach().clone(memory_format=torch.contiguous_format)
        if self._together.rank == tie.ranks[0]:
            for rank in others:
                dist.send(copy, dst=rank, group=self._together.group)
        else:
            dist.recv(copy, src=first, group=self._together.group)
            p.copy_(copy)

    def _sum(self, tie: Tie, grad: torch.Tensor) -> torch.Tensor:
        """At the first rank of the tie, in the order of ranks; it sends the sum to the others."""
        first, *others = (self._together.global_rank(rank) for rank in tie.ranks)
        group = self._together.group
        if self._together.rank == tie.ranks[0]:
            other = torch.empty_like(grad)
            for rank in others:
                dist.recv(other, src=rank, group=group)
                grad += other
            for rank in others:
                dist.send(grad, dst=rank, group=group)
        else:
            dist.send(grad.contiguous(), dst=first, group=group)
            dist.recv(grad, src=first, group=group)
        return grad
