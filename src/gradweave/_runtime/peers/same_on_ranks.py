"""Facts that must be the same on all ranks, compared before they train together; where one rank refuses, all do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from gradweave._runtime.replicas import settings_of
from gradweave.errors import GradweaveError, UnsupportedError

_LONGEST_FACT = 120
_ABSENT = "absent"


@contextmanager
def same_on_ranks(group: dist.ProcessGroup | None, *, technique: str, alone: bool = False) -> Iterator[dict[str, str]]:
    """Return a context for a rank's checks that raises on all ranks if one refuses, or if their facts differ.

    A rank that raised by itself would leave the others waiting in their next message.

    Args:
        group: All ranks that come here; None for the default group.
        technique: What trains, as its user calls it.
        alone: Whether there is no other rank, so that nothing is to be compared.

    Yields:
        This rank's facts by name, to be filled in in the same order on all ranks.

    Raises:
        Exception: What was raised inside, on the rank that raised it.
        GradweaveError: On the other ranks.
        UnsupportedError: On all ranks, naming the first fact that differs.
    """
    facts: dict[str, str] = {}
    problem: Exception | None = None
    try:
        yield facts
    except Exception as error:
        problem = error
    if not alone:
        _compare(facts, problem, group, technique)
    if problem is not None:
        raise problem


def refuse_together(problem: Exception | None, group: dist.ProcessGroup | None, *, technique: str) -> None:
    """Raise on all ranks what any of them has found wrong; all ranks call it.

    Args:
        problem: What this rank has found wrong.
        group: All ranks that come here; None for the default group.
        technique: What trains, as its user calls it.
    """
    with same_on_ranks(group, technique=technique):
        if problem is not None:
            raise problem


def describe_parameters(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return shape, type and use of parameters as facts; a parameter's second name is said to be that.

    Args:
        named: Parameters by name, in the order in which they are averaged or sent.
    """
    first_name: dict[int, str] = {}
    facts = {}
    for name, p in named:
        first = first_name.setdefault(id(p), name)
        told = f"of shape {tuple(p.shape)} and {p.dtype}" + ("" if p.requires_grad else ", frozen")
        facts[f"parameter {name}"] = told if first == name else f"the same as {first}"
    return facts


def describe_layouts(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return strides of parameters as facts: for messages that carry gradients in the order of memory."""
    return {f"layout of parameter {name}": f"with strides {p.stride()}" for name, p in named}


def describe_buffers(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return shape and type of buffers as facts."""
    return {f"buffer {name}": f"of shape {tuple(buffer.shape)} and {buffer.dtype}" for name, buffer in named}


def describe_optimizer(optimizer: Optimizer) -> dict[str, str]:
    """Return class and hyperparameters of an optimizer as facts.

    The class comes first: hyperparameters of another class differ for that reason. Those of a group are in no order
    of their own: a group that was loaded has them in another one.
    """
    settings = settings_of(optimizer)
    kind = next(iter(settings))
    return {kind: settings.pop(kind), **dict(sorted(settings.items()))}


def _compare(
    facts: Mapping[str, str], problem: Exception | None, group: dist.ProcessGroup | None, technique: str
) -> None:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    said: list[Any] = [None] * len(ranks)
    # All ranks get something from all others: a digest each. Whole descriptions, of thousands of parameters, would
    # grow with the square of the ranks, and travel only if a digest differs.
    digest = hashlib.sha256(repr(list(facts.items())).encode()).hexdigest()
    dist.all_gather_object(said, (None if problem is None else str(problem), digest), group=group)
    if problem is not None:
        return
    for rank, (refusal, _) in zip(ranks, said, strict=True):
        if refusal is not None:
            raise GradweaveError(f"{technique}: rank {rank} refuses, and so do all: {refusal}")
    if len({digest for _, digest in said}) > 1:
        everyone: list[Any] = [None] * len(ranks)
        dist.all_gather_object(everyone, facts, group=group)
        _raise_difference(everyone, ranks, technique)


def _raise_difference(everyone: Sequence[Mapping[str, str]], ranks: Sequence[int], technique: str) -> None:
    """Raise, on all ranks alike, the first fact of the first rank that differs."""
    first = everyone[0]
    remedy = f"give {technique} the same on all ranks"
    for rank, facts in zip(ranks, everyone, strict=True):
        for name in {**first, **facts}:
            here, there = first.get(name, _ABSENT), facts.get(name, _ABSENT)
            if here != there:
                reason = f"is {_shown(there)} on rank {rank} and {_shown(here)} on rank {ranks[0]}"
                raise UnsupportedError(name, reason, remedy)
        for name, other in zip(first, facts, strict=True):
            if name != other:
                raise UnsupportedError(name, f"comes where {other} does on rank {rank}", remedy)


def _shown(fact: str) -> str:
    return fact if len(fact) <= _LONGEST_FACT else f"{fact[:_LONGEST_FACT]}..."
