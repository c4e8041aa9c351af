"""Facts that must be the same on all ranks, and the comparison of weights while a node trains."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from gradweave._runtime.peers.same_on_ranks import describe_buffers, describe_optimizer, describe_parameters
from gradweave._runtime.replicas import Replicas
from gradweave.parallel.daso.flat_buffers import Layout
from gradweave.parallel.daso.options import Options

_OPTIONS_OF_A_RANK = ("checkpoint_dir",)
"""Options that may differ between ranks."""
_SHOWN_PLACES = 3
"""Places of parameters that a message shows."""


def covers_all(mesh: DeviceMesh | None) -> bool:
    """Return whether a job has several ranks, all of them in the mesh, if one was given."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    return dist.get_world_size() > 1 and (mesh is None or mesh.mesh.numel() == dist.get_world_size())


def declaration(
    options: Options,
    model: nn.Module,
    optimizer: Optimizer,
    params: Sequence[torch.Tensor],
    *,
    averages: bool,
    scales: bool,
) -> dict[str, str]:
    """Return the facts that must be the same on all ranks.

    Args:
        options: This rank's.
        model: The user's, for its buffers.
        optimizer: The user's, for its hyperparameters, and for the order of its parameters, which updates follow.
        params: All parameters, in the order in which they are packed.
        averages: Whether DASO averages gradients inside the node.
        scales: Whether losses are scaled.
    """
    facts = {
        field.name: repr(getattr(options, field.name))
        for field in fields(options)
        if field.name not in _OPTIONS_OF_A_RANK
    }
    facts["average_gradients"] = repr(averages)
    facts["scaler"] = "used" if scales else "not used"
    facts |= describe_optimizer(optimizer)
    facts |= describe_parameters(_named(model, params))
    facts |= describe_buffers(model.named_buffers())
    places = {id(p): number for number, p in enumerate(params)}
    for number, group in enumerate(optimizer.param_groups):
        facts[f"order of parameters in group {number}"] = _shortened([places[id(p)] for p in group["params"]])
    return facts


def replicas_of_node(
    model: nn.Module, optimizer: Optimizer, weights: Layout, group: dist.ProcessGroup | None
) -> Replicas | None:
    """Return the comparison of the weights of a node's ranks; None for a single rank.

    Args:
        model: The user's, for names of weights in messages.
        optimizer: The user's, whose learning rates may be the cause of a difference.
        weights: The weights to compare.
        group: The ranks of the node.
    """
    if group is None:
        return None

    def named() -> Iterable[tuple[str, torch.Tensor]]:
        return _named(model, weights.tensors)

    def rates() -> dict[str, str]:
        return {f"lr of group {number}": str(own.get("lr")) for number, own in enumerate(optimizer.param_groups)}

    return Replicas(named, group, of=f"DASO with {type(optimizer).__name__}", facts=rates)


def _named(model: nn.Module, tensors: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return tensors with their names in the model; with numbers, if only the optimizer has them."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [(names.get(id(p), str(number)), p) for number, p in enumerate(tensors)]


def _shortened(places: Sequence[int]) -> str:
    """Return the first few places, and a digest of the rest."""
    rest = hashlib.sha256(repr(places[_SHOWN_PLACES:]).encode()).hexdigest()[:8]
    shown = ", ".join(map(str, places[:_SHOWN_PLACES]))
    return shown + (f" ... ({rest})" if places[_SHOWN_PLACES:] else "")
