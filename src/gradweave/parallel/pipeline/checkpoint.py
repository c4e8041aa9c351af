"""State by the names that the whole model has, whoever holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradweave.errors import ArgumentError
from gradweave.parallel.pipeline.process_group import PipelinePeers


def own_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a rank's layers, out of the state of the whole model or of this rank."""
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
    """The state of the whole model, in the model's order, on the first rank."""
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
