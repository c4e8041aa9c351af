"""What DASO can be attached to; everything else is refused before anything is changed."""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradweave.compat.distributed import is_distributed_tensor
from gradweave.daso.topology import Groups, Topology
from gradweave.errors import ArgumentError
from gradweave.fusion.attach import is_fused
from gradweave.marks import check_is_module, is_in_compiled_step, is_in_daso, is_in_data_parallel


def check(model: nn.Module, optimizer: Optimizer, topology: Topology) -> None:
    """Raises what a user must change."""
    check_is_module(model)
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
        if isinstance(module, DistributedDataParallel):
            _check_wrapper(module, topology)


def _check_wrapper(wrapper: DistributedDataParallel, topology: Topology) -> None:
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    own = topology.ranks[topology.node]
    if sorted(ranks) != sorted(own):
        remedy = f'averages over ranks {ranks}; give it process_group=mesh.get_group("local"), here ranks {list(own)}'
        raise ArgumentError("model", "DistributedDataParallel", remedy)


def check_same(params: list[torch.Tensor], topology: Topology, groups: Groups) -> None:
    """All ranks must have the same parameters, or exchanges would mix them up."""
    if groups.everyone is None:
        return
    own = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in params]
    all_of_them: list[object] = [None] * dist.get_world_size(groups.everyone)
    dist.all_gather_object(all_of_them, own, group=groups.everyone)
    ranks = list(chain(*topology.ranks))
    for rank, theirs in zip(ranks, all_of_them, strict=True):
        if theirs != all_of_them[0]:
            remedy = f"has other shapes, dtypes or frozen parameters on rank {rank} than on rank {ranks[0]}"
            raise ArgumentError("model", f"{len(own)} parameters on rank {topology.rank}", remedy)


def everything_trained(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """Parameters of the model, and those that only the optimizer has, once each."""
    own = chain(model.parameters(), *(group["params"] for group in optimizer.param_groups))
    return list(dict.fromkeys(own))
