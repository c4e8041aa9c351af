"""Requirements of data-parallel training, checked before anything is changed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradweave._runtime.claims import Technique
from gradweave._runtime.composition import refuse_conflicts
from gradweave._runtime.optimizer_steps.independence import check_independent
from gradweave._runtime.replicas import Averager, ReplicaError
from gradweave._runtime.requirements import (
    refuse_compiled,
    refuse_copies,
    refuse_sharded,
    require_module,
    require_one_device,
    require_optimizer,
    require_owned,
    require_shapes,
)
from gradweave.errors import UnsupportedError


def check(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ArgumentError or UnsupportedError for a model or an optimizer that cannot be trained data-parallel."""
    require_module(model)
    require_optimizer(
        optimizer,
        refused=(torch.optim.LBFGS, torch.optim.SparseAdam),
        remedy="it cannot be updated in parts; use SGD, Adam or AdamW",
    )
    refuse_conflicts(Technique.DATA_PARALLEL, model=model, optimizer=optimizer)
    refuse_copies(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UnsupportedError("DistributedDataParallel", "it averages gradients by itself", "give its module instead")
    refuse_compiled(model, remedy="give the plain model, or use DistributedDataParallel")
    require_owned(model, optimizer)
    params = list(model.parameters())
    if not any(p.requires_grad for p in params):
        raise UnsupportedError(type(model).__name__, "it has no parameter that is trained", "set requires_grad on some")
    require_shapes(params)
    refuse_sharded(model)
    for tensor in (*params, *model.buffers()):
        if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
            raise UnsupportedError(
                f"a tensor of shape {tuple(tensor.shape)}",
                "its elements share memory",
                "give it memory of its own by clone()",
            )
    require_one_device(params)
    check_independent(optimizer, remedy="use DistributedDataParallel")


def refuse_averager(found: Averager) -> None:
    """Raise ReplicaError: gradients would be averaged twice."""
    raise ReplicaError(
        f"DataParallel: {found.name} averages or shards the gradients of this model too, and both together are wrong; "
        "use one of them: leave the model out of accelerator.prepare(), use no strategy of Lightning's that wraps it, "
        "or call detach() and train without DataParallel"
    )
