"""Checks of a model and an optimizer, made before DASO changes anything."""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradweave._compat.distributed import ddp_parameters
from gradweave._runtime.claims import Technique
from gradweave._runtime.composition import refuse_conflicts
from gradweave._runtime.replicas import Averager, averager_inside
from gradweave._runtime.requirements import (
    refuse_copies,
    refuse_sharded,
    require_module,
    require_one_device,
    require_optimizer,
)
from gradweave.errors import UnsupportedError
from gradweave.parallel.daso.topology import Topology


def check(model: nn.Module, optimizer: Optimizer, topology: Topology, *, averages: bool) -> None:
    """Raise UnsupportedError or ArgumentError for what DASO cannot be attached to.

    Args:
        model: The user's.
        optimizer: The user's.
        topology: The nodes and their ranks.
        averages: Whether DASO averages gradients inside the node, and not a wrapper.
    """
    require_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError("torch.jit.script", "it takes no hooks", "give the plain model, or script parts of it")
    require_optimizer(
        optimizer,
        refused=(torch.optim.LBFGS,),
        remedy="it takes several backwards per step; use SGD, Adam or AdamW",
    )
    refuse_conflicts(Technique.DASO, model=model, optimizer=optimizer)
    params = all_parameters(model, optimizer)
    refuse_sharded(model, params)
    require_one_device(params)
    refuse_copies(model)
    inside = averager_inside(model)
    if inside is not None:
        check_averager(inside, topology, averages=averages)


def is_wrapped(model: object) -> bool:
    """Return whether a DistributedDataParallel in a model, or around it, averages all of its gradients."""
    if not isinstance(model, nn.Module):
        return False
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return any(trained <= {id(p) for p in ddp_parameters(wrapper)} for wrapper in wrappers)


def check_averager(found: Averager, topology: Topology, *, averages: bool) -> None:
    """Raise UnsupportedError for a wrapper that averages gradients too, unless it does so inside the node, for DASO."""
    ranks = sorted(dist.get_process_group_ranks(found.group)) if found.group is not None else None
    own = sorted(topology.ranks[topology.node])
    if ranks is None or not (len(ranks) == 1 or (ranks == own and not averages)):
        over = f"over ranks {ranks}" if ranks is not None else "or shards the model"
        instead = 'DistributedDataParallel(model, process_group=mesh.get_group("local"))'
        raise UnsupportedError(
            found.name,
            f"it averages gradients already, {over}, so that nodes would not train independently",
            "give DASO the plain model and run that one (Accelerate: prepare() without the model; Lightning: no ddp "
            f"strategy), or wrap it beforehand in {instead}, here ranks {own}, and give DASO the wrapper",
        )


def all_parameters(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of the model, then those that only the optimizer has, once each."""
    own = chain(model.parameters(), *(group["params"] for group in optimizer.param_groups))
    return list(dict.fromkeys(own))
