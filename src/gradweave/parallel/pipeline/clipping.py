"""Clipping by the norm of all gradients, those of other ranks included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from gradweave.errors import ArgumentError
from gradweave.parallel.pipeline.process_group import PipelinePeers


def clip_grad_norm(
    params: Mapping[str, nn.Parameter],
    places: Mapping[str, int],
    skipped: Set[nn.Parameter],
    peers: PipelinePeers,
    *,
    max_norm: float,
    norm_type: float,
    like: torch.Tensor,
) -> torch.Tensor:
    """Scales this rank's gradients as ``torch.nn.utils.clip_grad_norm_`` would those of the whole model.

    The norms of single gradients are gathered in the model's order, so that the total is the same number, and
    the same on all ranks.

    Args:
        params: Of this rank, by name.
        places: The place of every parameter of the whole model, by name.
        skipped: Those of this rank that are counted elsewhere.
        peers: The ranks.
        max_norm: What the total norm may be.
        norm_type: Which norm.
        like: A tensor of the type and device that norms are summed up in, of the same type on all ranks.

    Returns:
        The total norm.
    """
    if not max_norm >= 0:
        raise ArgumentError("max_norm", max_norm, "give 0 or more")
    own: dict[nn.Parameter, str] = {}
    for name, p in params.items():
        if p.grad is not None:
            own.setdefault(p, name)
    norms = like.new_zeros(len(places))
    for p, name in own.items():
        if p not in skipped:
            norms[places[name]] = torch.linalg.vector_norm(p.grad, norm_type).to(norms.dtype)
    dist.all_reduce(norms, group=peers.group)
    total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    clip_grads_with_norm_(list(own), max_norm, total)
    return total


def places_of(layers: Sequence[tuple[str, nn.Module]]) -> dict[str, int]:
    """The place of each parameter in a model made of layers, in the model's order; tied ones have one place."""
    places: dict[str, int] = {}
    first: dict[nn.Parameter, int] = {}
    for name, layer in layers:
        for own, p in layer.named_parameters(remove_duplicate=False):
            places[f"{name}.{own}"] = first.setdefault(p, len(first))
    return places
