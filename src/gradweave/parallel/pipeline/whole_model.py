"""What ranks do together for the model that their layers are parts of: clipping, its state, decisions of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from gradweave._runtime.claims import PipelinePart, Technique, claim_model
from gradweave.errors import ArgumentError, GradweaveError
from gradweave.parallel.pipeline.process_group import PipelinePeers

_PATIENCE = timedelta(seconds=30)
"""For an optimizer that another rank has not made yet; usually all have, before the step whose gradients they use."""


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
    """Scale this rank's gradients as ``torch.nn.utils.clip_grad_norm_`` would those of the whole model.

    The norms of single gradients are gathered in the model's order, so that the total is the number that the whole
    model gives, on all ranks.

    Args:
        params: Of this rank, by name.
        places: The place of every parameter of the whole model, by name.
        skipped: Parameters of this rank that another one counts.
        peers: The ranks.
        max_norm: Bound on the total norm.
        norm_type: Order of the norm.
        like: A tensor of the device and type in which norms are summed up; the type is the same on all ranks.

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
    """Return the place of each parameter in the order of a model made of layers; tied ones have one place."""
    places: dict[str, int] = {}
    first: dict[nn.Parameter, int] = {}
    for name, layer in layers:
        for own, p in layer.named_parameters(remove_duplicate=False):
            places[f"{name}.{own}"] = first.setdefault(p, len(first))
    return places


def own_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a rank's layers, out of the state of the whole model or of this rank."""
    wanted = module.state_dict()
    missing = [name for name in wanted if name not in state]
    if missing:
        named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ArgumentError("state", f"{len(state)} entries", f"lacks {named}; give the state of the whole model")
    for name, own in wanted.items():
        if isinstance(own, torch.Tensor) and own.shape != state[name].shape:
            raise ArgumentError("state", name, f"is of shape {tuple(state[name].shape)}, not {tuple(own.shape)}")
    return {name: state[name] for name in wanted}


def gather_state(module: nn.Module, layers: Sequence[str], peers: PipelinePeers) -> dict[str, Any] | None:
    """Return the state of the whole model, in the model's order, on the first rank; None on others."""
    own = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in module.state_dict().items()
    }
    parts: list[Any] | None = [None] * peers.size if peers.rank == 0 else None
    dist.gather_object(own, parts, dst=peers.global_rank(0), group=peers.group)
    if parts is None:
        return None
    place = {name: number for number, name in enumerate(layers)}
    entries = [entry for part in parts for entry in part.items()]
    return dict(sorted(entries, key=lambda entry: place[entry[0].partition(".")[0]]))


class OptimizerClaims:
    """Claims on this rank's layers, by which optimizers know that the layers are a part of a model.

    Such an optimizer asks through its claim before it decides something for the whole model, as whether all gradients
    are finite. Claims last until the pipeline is closed.

    Args:
        layers: Of the whole model.
        own: The layers on this rank.
        tied: Parameters of this rank that other ranks have too.
        peers: The ranks.
        replicas: Return the ranks that have these layers in other pipelines; None if there are none.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        own: Sequence[nn.Module],
        tied: Sequence[nn.Parameter],
        peers: PipelinePeers,
        replicas: Callable[[], Any],
    ) -> None:
        modules = [module for _, layer in layers for module in layer.modules()]
        linears = [module for module in modules if isinstance(module, nn.Linear)]
        here = {id(module) for layer in own for module in layer.modules()}
        self._peers: PipelinePeers | None = peers
        self._optimizers = 0
        self._complete: set[str] = set()
        part = PipelinePart(
            peers.size,
            frozenset(map(id, tied)),
            frozenset(tuple(module.weight.shape) for module in modules if isinstance(module, nn.Embedding)),
            bool(linears) and id(linears[-1]) in here,
            self._enlist,
            self._all_agree,
            replicas,
        )
        self._claims = ExitStack()
        for layer in own:
            claim_model(layer, Technique.PIPELINE, self, self._claims, detail=part)

    def remove(self) -> None:
        """Release the layers; optimizers decide by themselves from here on."""
        self._claims.close()
        self._peers = None

    def _enlist(self) -> str:
        name = f"optimizer-{self._optimizers}"
        self._optimizers += 1
        if self._peers is not None:
            self._peers.note(f"{name}-{self._peers.rank}")
        return name

    def _all_agree(self, name: str, flag: torch.Tensor) -> torch.Tensor:
        peers = self._peers
        if peers is None:
            return flag
        if name not in self._complete:
            self._wait_for_others(name, peers)
        opposed = (~flag).to(torch.float32).reshape(1)
        dist.all_reduce(opposed, dist.ReduceOp.MAX, group=peers.group)
        return (opposed == 0).reshape(flag.shape)

    def _wait_for_others(self, name: str, peers: PipelinePeers) -> None:
        missing = peers.missing([f"{name}-{rank}" for rank in range(peers.size)], _PATIENCE)
        if missing:
            raise GradweaveError(
                f"rank {missing[0]} of the pipeline has no optimizer of this kind, and all ranks decide together "
                "whether a step is taken: make one of the same kind on each rank, before the first step"
            )
        self._complete.add(name)
