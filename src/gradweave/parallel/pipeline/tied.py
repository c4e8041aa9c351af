"""Weights that several layers share, where these layers are on different ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from gradweave.errors import GradweaveError, UnsupportedError
from gradweave.parallel.pipeline.process_group import PipelinePeers

_FROZEN, _NO_GRADIENT, _GRADIENT = range(3)
"""A rank's word on its copy of a tied weight, sent before any gradient; the greatest of all words decides."""


@dataclass(frozen=True)
class Tie:
    """A weight of which several ranks have copies.

    Attributes:
        names: All of its names in the whole model, in order.
        ranks: The ranks that have a copy, in order.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]


def find_ties(layers: Sequence[tuple[str, nn.Module]], rank_of_layer: Sequence[int]) -> list[Tie]:
    """Return the weights that layers of different ranks share.

    Args:
        layers: Of the whole model.
        rank_of_layer: The rank of each layer.
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
    """Raise for a buffer that layers of two ranks share: it would become two, each with half of what is written."""
    seen: dict[int, tuple[str, int]] = {}
    for (name, layer), rank in zip(layers, rank_of_layer, strict=True):
        for own, buffer in layer.named_buffers(remove_duplicate=False):
            other, where = seen.setdefault(id(buffer), (f"{name}.{own}", rank))
            if where != rank:
                raise UnsupportedError(
                    f"the buffer {name}.{own}", f"it is {other}, on another rank, too", "give each layer its own"
                )


class TiedGradients:
    """Sums of the gradients of tied weights over the ranks that share them, by which their copies stay alike.

    Args:
        ties: Of the whole model, the same on all ranks.
        params: Of this rank, by name.
        peers: The ranks.
    """

    def __init__(self, ties: Sequence[Tie], params: Mapping[str, nn.Parameter], peers: PipelinePeers) -> None:
        self._peers = peers
        self._own: list[tuple[Tie, nn.Parameter]] = []
        for tie in ties:
            if peers.rank in tie.ranks:
                p = next(params[name] for name in tie.names if name in params)
                self._own.append((tie, p))
        with torch.no_grad():
            for tie, p in self._own:
                self._share(tie, p)

    @property
    def own(self) -> list[nn.Parameter]:
        """This rank's copies."""
        return [p for _, p in self._own]

    def counted_elsewhere(self) -> set[nn.Parameter]:
        """Return this rank's copies whose gradient another rank counts in a norm."""
        return {p for tie, p in self._own if tie.ranks[0] != self._peers.rank}

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Return a context for a step that sums its gradients of tied weights over their ranks."""
        before = [p.grad for _, p in self._own]
        for _, p in self._own:
            p.grad = None
        try:
            yield
        except BaseException:
            for (_, p), earlier in zip(self._own, before, strict=True):
                p.grad = earlier
            raise
        for (tie, p), earlier in zip(self._own, before, strict=True):
            grad = self._sum(tie, p)
            if earlier is not None and grad is not None:
                grad = earlier.add_(grad)
            p.grad = earlier if grad is None else grad

    def _share(self, tie: Tie, p: torch.Tensor) -> None:
        """Give all ranks of a tie the first one's weight: they may have been initialized differently."""
        first, *others = (self._peers.global_rank(rank) for rank in tie.ranks)
        copy = p.detach().clone(memory_format=torch.contiguous_format)
        if self._peers.rank == tie.ranks[0]:
            for rank in others:
                dist.send(copy, dst=rank, group=self._peers.group)
        else:
            dist.recv(copy, src=first, group=self._peers.group)
            p.copy_(copy)

    def _sum(self, tie: Tie, p: nn.Parameter) -> torch.Tensor | None:
        """Return the sum of the gradients that the ranks of a tie have; None if none of them has one.

        A word goes ahead of each gradient, since a rank may have none.
        """
        word = _FROZEN if not p.requires_grad else _NO_GRADIENT if p.grad is None else _GRADIENT
        if self._peers.rank == tie.ranks[0]:
            return self._lead(tie, p, word)
        return self._follow(self._peers.global_rank(tie.ranks[0]), p, word)

    def _lead(self, tie: Tie, p: nn.Parameter, word: int) -> torch.Tensor | None:
        """Sum up in the order of ranks, by which the sum is the same in every run, and send it to the others."""
        others = [self._peers.global_rank(rank) for rank in tie.ranks[1:]]
        words = [word, *(self._hear(rank, p) for rank in others)]
        _check_alike(tie, words)
        verdict = max(words)
        total = None
        if verdict == _GRADIENT:
            total = _dense(p)
            other = torch.empty_like(total)
            for rank, theirs in zip(others, words[1:], strict=True):
                if theirs == _GRADIENT:
                    dist.recv(other, src=rank, group=self._peers.group)
                    total += other
        for rank in others:
            self._say(verdict, rank, p)
            if total is not None:
                dist.send(total, dst=rank, group=self._peers.group)
        return total

    def _follow(self, first: int, p: nn.Parameter, word: int) -> torch.Tensor | None:
        """Send this rank's gradient to the first one, and return the sum."""
        self._say(word, first, p)
        if word == _GRADIENT:
            dist.send(_dense(p), dst=first, group=self._peers.group)
        if self._hear(first, p) != _GRADIENT:
            return None
        total = _dense(p)
        dist.recv(total, src=first, group=self._peers.group)
        return total

    def _say(self, word: int, rank: int, like: torch.Tensor) -> None:
        dist.send(torch.tensor([word], device=like.device), dst=rank, group=self._peers.group)

    def _hear(self, rank: int, like: torch.Tensor) -> int:
        heard = torch.empty(1, dtype=torch.int64, device=like.device)
        dist.recv(heard, src=rank, group=self._peers.group)
        return int(heard.item())


def _dense(p: nn.Parameter) -> torch.Tensor:
    """Return a weight's gradient, or zeros, contiguous as messages need it."""
    if p.grad is None:
        return torch.zeros_like(p, memory_format=torch.contiguous_format)
    return p.grad.contiguous()


def _check_alike(tie: Tie, words: Sequence[int]) -> None:
    """Raise if one copy is trained and another is not: they would drift apart."""
    frozen = [rank for rank, word in zip(tie.ranks, words, strict=True) if word == _FROZEN]
    if frozen and len(frozen) < len(words):
        raise GradweaveError(
            f"{tie.names[0]} is one weight of ranks {list(tie.ranks)}, but frozen on {frozen} only; call "
            "requires_grad_() on all of them"
        )
