"""Ways to train on several nodes: DASO, and what torch and others offer instead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from gradweave.parallel.daso import DASO

PERIOD = 4
OUTER_PERIOD, OUTER_LR, OUTER_MOMENTUM = 16, 0.7, 0.9


class Way:
    """A model, an optimizer, and what happens behind a step and at the ends of epochs and of training."""

    def __init__(self, model: nn.Module, optimizer: Any, *, daso: DASO | None = None) -> None:
        self.model, self.optimizer, self.daso = model, optimizer, daso
        self.after_step: Callable[[], None] = lambda: None
        self.after_epoch: Callable[[float], None] = lambda _: None
        self.at_the_end: Callable[[], None] = lambda: None


def _sgd(model: nn.Module, lr: float) -> SGD:
    return SGD(model.parameters(), lr=lr, momentum=0.9)


def _node_group() -> dist.ProcessGroup:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return groups[dist.get_rank() // 2]


def ddp(model: nn.Module, lr: float, **_: Any) -> Way:
    return Way(DistributedDataParallel(model), _sgd(model, lr))


def ddp_bf16(model: nn.Module, lr: float, **_: Any) -> Way:
    wrapped = DistributedDataParallel(model)
    # torch's own hook, behind a name for which DDP does not insist on NCCL.
    wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    return Way(wrapped, _sgd(model, lr))


def post_local(model: nn.Module, lr: float, **_: Any) -> Way:
    """Gradients inside the node, weights over all ranks every few steps."""
    wrapped = DistributedDataParallel(model)
    state = local_hook.PostLocalSGDState(process_group=None, subgroup=_node_group(), start_localSGD_iter=0)
    wrapped.register_comm_hook(state, local_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=0)
    return Way(wrapped, PostLocalSGDOptimizer(_sgd(model, lr), averager))


def hierarchical(model: nn.Module, lr: float, **_: Any) -> Way:
    """Weights inside the node every step, over all ranks every few."""
    wrapped = DistributedDataParallel(model)
    state = local_hook.PostLocalSGDState(
        process_group=None, subgroup=_node_group(), start_localSGD_iter=0, post_local_gradient_allreduce=False
    )
    wrapped.register_comm_hook(state, local_hook.post_localSGD_hook)
    periods = OrderedDict([(1, 2), (PERIOD, dist.get_world_size())])
    averager = HierarchicalModelAverager(period_group_size_dict=periods, warmup_steps=0)
    return Way(wrapped, PostLocalSGDOptimizer(_sgd(model, lr), averager))


def diloco(model: nn.Module, lr: float, **_: Any) -> Way:
    """Gradients inside the node; every few steps an outer Nesterov step on the mean of what nodes changed."""
    wrapped = DistributedDataParallel(model, process_group=_node_group())
    way = Way(wrapped, _sgd(model, lr))
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    leads = dist.get_rank() % 2 == 0
    params = list(model.parameters())
    anchor = nn.utils.parameters_to_vector(params).detach().clone()
    outer_param = nn.Parameter(anchor)
    outer = SGD([outer_param], lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    node = wrapped.process_group
    count = 0

    def exchange() -> None:
        nonlocal count
        count += 1
        if count % OUTER_PERIOD:
            return
        with torch.no_grad():
            moved = outer_param - nn.utils.parameters_to_vector(params)
            if leads:
                dist.all_reduce(moved, group=across)
            dist.broadcast(moved, dist.get_rank() // 2 * 2, group=node)
            outer_param.grad = moved.div_(2)
            outer.step()
            nn.utils.vector_to_parameters(outer_param, params)

    way.after_step = exchange
    return way


def daso(model: nn.Module, lr: float, **options: Any) -> Way:
    optimizer = _sgd(model, lr)
    attached = DASO(model, optimizer, **{k: v for k, v in options.items() if k != "epochs"})
    way = Way(model, optimizer, daso=attached)
    way.at_the_end = attached.finish
    return way


def daso_paper(model: nn.Module, lr: float, *, epochs: int, **_: Any) -> Way:
    way = daso(model, lr, mode="paper", warm_up=1, cool_down=1, total=epochs)
    way.after_epoch = way.daso.epoch_end  # type: ignore[union-attr]
    return way


WAYS: dict[str, Callable[..., Way]] = {
    "ddp": ddp,
    "ddp_bf16": ddp_bf16,
    "post_local": post_local,
    "hierarchical": hierarchical,
    "diloco": diloco,
    "daso_paper": daso_paper,
    "daso": daso,
}
