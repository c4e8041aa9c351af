"""What DASO can be attached to; everything else is refused before anything is changed."""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradweave._compat.distributed import ddp_parameters, is_distributed_tensor
from gradweave._runtime.claims import (
    check_is_module,
    check_not_in_pipeline,
    is_in_compiled_step,
    is_in_daso,
    is_in_data_parallel,
    trained_in_parallel_by,
)
from gradweave._runtime.replicas import Averager, averager_inside
from gradweave.errors import ArgumentError
from gradweave.fusion.api import is_fused
from gradweave.parallel.daso.topology import Topology


def check(model: nn.Module, optimizer: Optimizer, topology: Topology, *, averages: bool) -> None:
    """Raises what a user must change.

    Args:
        model: The user's.
        optimizer: The user's.
        topology: Where ranks are.
        averages: Whether DASO averages gradients inside the node, and not a wrapper.
    """
    check_is_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentError("model", "torch.jit.script", "takes no hooks; give the plain model, or script parts of it")
    check_not_in_pipeline(model)
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError("optimizer", type(optimizer).__name__, "give a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError("optimizer", "LBFGS", "takes several backwards per step; use SGD, Adam or AdamW")
    if is_in_daso(optimizer):
        raise ArgumentError(
            "optimizer", type(optimizer).__name__, "has a DASO already; finish() or detach() that first"
        )
    if is_in_compiled_step(optimizer):
        raise ArgumentError("optimizer", type(optimizer).__name__, "is part of a compiled step; drop that step first")
    if is_in_data_parallel(optimizer):
        raise ArgumentError(
            "optimizer", type(optimizer).__name__, "is in a DataParallel over all ranks; detach() that first"
        )
    if "DataParallel" in trained_in_parallel_by(model):
        raise ArgumentError("model", type(model).__name__, "is in a DataParallel over all ranks; detach() that first")
    if is_fused(model):
        raise ArgumentError(
            "model", type(model).__name__, "is fused: updates would come before averages; detach() that"
        )
    params = everything_trained(model, optimizer)
    if any(is_distributed_tensor(p) for p in params):
        raise ArgumentError("model", "FSDP", "sharded parameters are not supported; give an unsharded model")
    if len({p.device for p in params}) > 1:
        raise ArgumentError("model", "parameters on several devices", "give a model that is on one device")
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            raise ArgumentError("model", "DataParallel", "run one process per device, under torchrun")
    inside = averager_inside(model)
    if inside is not None:
        check_averager(inside, topology, averages=averages)


def is_wrapped(model: object) -> bool:
    """Whether a DistributedDataParallel averages all gradients of a model that is given with it."""
    if not isinstance(model, nn.Module):
        return False
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    return any(trained <= {id(p) for p in ddp_parameters(wrapper)} for wrapper in wrappers)


def check_averager(found: Averager, topology: Topology, *, averages: bool) -> None:
    """Raises for a wrapper that averages gradients too, unless it does so inside the node, in our place."""
    ranks = sorted(dist.get_process_group_ranks(found.group)) if found.group is not None else None
    own = sorted(topology.ranks[topology.node])
    if ranks is None or not (len(ranks) == 1 or (ranks == own and not averages)):
        over = f"over ranks {ranks}" if ranks is not None else "or shards the model"
        instead = 'DistributedDataParallel(model, process_group=mesh.get_group("local"))'
        remedy = (
            f"averages gradients already, {over}, so that nodes would not be apart; give DASO the model as it is and "
            "run that one (Accelerate: prepare() without the model; Lightning: no ddp strategy), or wrap it beforehand "
            f"in {instead}, here ranks {own}, and give DASO that"
        )
        raise ArgumentError("model", found.name, remedy)


def everything_trained(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """Parameters of the model, and those that only the optimizer has, once each."""
    own = chain(model.parameters(), *(group["params"] for group in optimizer.param_groups))
    return list(dict.fromkeys(own))
