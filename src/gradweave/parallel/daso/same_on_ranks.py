"""What all ranks must have the same of before they train together; where one refuses, all do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gradweave._runtime.replicas import Replicas
from gradweave.errors import ArgumentError
from gradweave.parallel.daso.flat_buffers import Layout
from gradweave.parallel.daso.options import Options

_OWN = ("checkpoint_dir",)
"""Options that each rank may have its own of."""
_PLAIN = (bool, int, float, str, complex, type(None))


@contextmanager
def alike(group: dist.ProcessGroup | None, *, alone: bool) -> Iterator[dict[str, str]]:
    """Around what is checked on each rank: an error on one is an error on all, as is a difference in what they declare.

    Args:
        group: Of all ranks that come here; None for all there are.
        alone: Whether there is no other rank: an error is then raised as it is.

    Yields:
        What this rank declares, by argument, to be filled in.
    """
    own: dict[str, str] = {}
    problem: Exception | None = None
    try:
        yield own
    except Exception as error:
        problem = error
    if not alone:
        _compare(own, problem, group)
    if problem is not None:
        raise problem


def _compare(own: dict[str, str], problem: Exception | None, group: dist.ProcessGroup | None) -> None:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    said: list[Any] = [None] * len(ranks)
    # Only where something differs does more than a few bytes go round.
    digest = hashlib.sha256(repr(list(own.items())).encode()).hexdigest()
    dist.all_gather_object(said, (None if problem is None else str(problem), digest), group=group)
    if problem is not None:
        return
    for rank, (text, _) in zip(ranks, said, strict=True):
        if text is not None:
            raise ArgumentError("rank", rank, f"has refused, and so all do: {text}")
    if len({digest for _, digest in said}) > 1:
        declared: list[Any] = [None] * len(ranks)
        dist.all_gather_object(declared, own, group=group)
        _name(declared, ranks)


def _name(declared: list[dict[str, str]], ranks: Sequence[int]) -> None:
    """Raises, on all ranks alike, what the first rank that is different has different."""
    first = declared[0]
    for rank, theirs in zip(ranks, declared, strict=True):
        for argument in {**first, **theirs}:
            here, there = first.get(argument, "absent"), theirs.get(argument, "absent")
            if here != there and argument == "model":
                remedy = f"has other shapes, dtypes or frozen parameters on rank {rank} than on rank {ranks[0]}"
                raise ArgumentError(argument, f"parameters of rank {rank}", remedy)
            if here != there:
                remedy = f"is {there} on rank {rank} and {here} on rank {ranks[0]}; give all ranks the same"
                raise ArgumentError(argument, f"different between ranks {ranks[0]} and {rank}", remedy)


def covers_all(mesh: DeviceMesh | None) -> bool:
    """Whether all ranks there are, and more than one, are in a mesh; without one, all are."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size() > 1 and (mesh is None or mesh.mesh.numel() == dist.get_world_size())


def declaration(
    options: Options,
    optimizer: Optimizer,
    params: Sequence[torch.Tensor],
    buffers: Sequence[tuple[str, torch.Tensor]],
    *,
    averages: bool,
    scales: bool,
) -> dict[str, str]:
    """What must be the same on all ranks, by argument, as text."""
    said = {field.name: repr(getattr(options, field.name)) for field in fields(options) if field.name not in _OWN}
    said["average_gradients"] = repr(averages)
    said["scaler"] = "used" if scales else "not used"
    said["optimizer"] = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    said["model"] = repr([(tuple(p.shape), str(p.dtype), p.requires_grad) for p in params])
    said["buffers"] = repr([(name, tuple(b.shape), str(b.dtype)) for name, b in buffers])
    places = {id(p): number for number, p in enumerate(params)}
    for number, group in enumerate(optimizer.param_groups):
        said[f"parameters in group {number} of the optimizer"] = repr(len(group["params"]))
        order = [places[id(p)] for p in group["params"]]
        said[f"order of parameters in group {number} of the optimizer"] = _shortened(order)
        for key, value in sorted(group.items()):
            if _is_plain(value):
                said[f"{key} of group {number} of the optimizer"] = repr(_as_plain(value))
    return said


def replicas_of_node(
    model: nn.Module, optimizer: Optimizer, weights: Layout, group: dist.ProcessGroup | None
) -> Replicas | None:
    """What compares the weights of the ranks of a node; None if there is only one."""
    if group is None:
        return None
    names = {id(p): name for name, p in model.named_parameters()}

    def named() -> list[tuple[str, torch.Tensor]]:
        return [(names.get(id(p), f"parameter {i}"), p) for i, p in enumerate(weights.tensors)]

    def facts() -> dict[str, str]:
        groups = enumerate(optimizer.param_groups)
        return {f"lr of group {number} of the optimizer": str(own.get("lr")) for number, own in groups}

    return Replicas(named, group, of=f"DASO with {type(optimizer).__name__}", facts=facts)


def _shortened(order: Sequence[int]) -> str:
    """Which parameters of the model come in which order: the first few, and what tells the rest apart."""
    rest = hashlib.sha256(repr(order[3:]).encode()).hexdigest()[:8]
    return ", ".join(map(str, order[:3])) + (f" ... ({rest})" if order[3:] else "")


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _as_plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_as_plain(item) for item in value]
    return value.item() if isinstance(value, torch.Tensor) else value
