"""What can be trained data-parallel; everything else is refused before anything is changed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradweave._compat.distributed import is_distributed_tensor, is_managed_by_fsdp
from gradweave._compat.eager import is_compiled
from gradweave._runtime.claims import (
    check_is_module,
    check_not_in_pipeline,
    is_in_compiled_step,
    is_in_daso,
    is_in_data_parallel,
    trained_in_parallel_by,
)
from gradweave._runtime.replicas import Averager, ReplicaError
from gradweave.errors import ArgumentError
from gradweave.fusion.api import is_fused
from gradweave.fusion.independence import check_independent
from gradweave.reordering.api import is_reordered


def check(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises what a user must change."""
    check_is_module(model)
    check_not_in_pipeline(model)
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError("optimizer", type(optimizer).__name__, "give a torch.optim.Optimizer")
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise ArgumentError("optimizer", type(optimizer).__name__, "cannot be updated in parts; use SGD, Adam or AdamW")
    for is_in, what in (
        (is_in_data_parallel, "is in a DataParallel already; detach() that first"),
        (is_in_daso, "has a DASO, which averages itself; detach() that first"),
        (is_in_compiled_step, "is part of a compiled step; drop that step first"),
    ):
        if is_in(optimizer):
            raise ArgumentError("optimizer", type(optimizer).__name__, what)
    if "DASO" in trained_in_parallel_by(model):
        raise ArgumentError("model", type(model).__name__, "has a DASO, which averages itself; detach() that first")
    if is_fused(model):
        raise ArgumentError("model", type(model).__name__, "is fused; detach() that, updates are deferred anyway")
    if is_reordered(model):
        raise ArgumentError("model", type(model).__name__, "is reordered; detach() that: DataParallel reorders itself")
    for module in model.modules():
        if isinstance(module, (nn.DataParallel, DistributedDataParallel)):
            raise ArgumentError("model", type(module).__name__, "averages gradients itself; give its module")
        if is_compiled(module):
            how = "torch.jit.script" if isinstance(module, torch.jit.ScriptModule) else "torch.compile"
            raise ArgumentError("model", how, "runs layers where they cannot be seen; give the plain model, or use DDP")
    own = {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in own:
                shape = f"a parameter of shape {tuple(p.shape)}"
                raise ArgumentError("optimizer", shape, "is not in the model; give the model that owns it")
    params = list(model.parameters())
    if not any(p.requires_grad for p in params):
        raise ArgumentError("model", type(model).__name__, "has no parameter that is trained")
    if any(nn.parameter.is_lazy(p) for p in params):
        raise ArgumentError("model", "lazy parameters", "run a forward once before you wrap the model")
    if any(is_distributed_tensor(p) for p in params) or any(is_managed_by_fsdp(m) for m in model.modules()):
        raise ArgumentError("model", "FSDP", "sharded parameters are not supported; give an unsharded model")
    for tensor in (*params, *model.buffers()):
        if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
            shape = f"a tensor of shape {tuple(tensor.shape)}"
            raise ArgumentError("model", shape, "has elements that share memory; give it memory of its own by clone()")
    if len({p.device for p in params}) > 1:
        raise ArgumentError("model", "parameters on several devices", "give a model that is on one device")
    try:
        check_independent(optimizer)
    except ArgumentError as error:
        why = error.remedy.partition(";")[0]
        raise ArgumentError("optimizer", error.value, f"{why}; use DistributedDataParallel") from error


def describe_model(model: nn.Module) -> dict[str, str]:
    """What must be the same on all ranks, or averages would mix parameters up."""
    told = {
        name: f"a parameter of shape {tuple(p.shape)} and {p.dtype}" + ("" if p.requires_grad else ", frozen")
        for name, p in model.named_parameters()
    }
    buffers = model.named_buffers()
    return told | {name: f"a buffer of shape {tuple(b.shape)} and {b.dtype}" for name, b in buffers}


def refuse_averager(found: Averager) -> None:
    """Raises: something else averages or shards what DataParallel averages."""
    raise ReplicaError(
        f"DataParallel: {found.name} averages or shards the gradients of this model too, and both together are wrong; "
        "use one of them: leave the model out of accelerator.prepare(), use no strategy of Lightning's that wraps it, "
        "or call detach() and train without DataParallel"
    )


def share_state(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Gives everybody the first rank's parameters and buffers."""
    root = dist.get_global_rank(group, 0) if group is not None else 0
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dense = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(dense, root, group=group)
            tensor.copy_(dense)
