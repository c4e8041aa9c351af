"""Arguments that ``compile()`` refuses at once, with the reason."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from numbers import Real
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradweave._compat.modules import CriterionModule
from gradweave._compat.optimizers import step_pre_hooks
from gradweave._logging import announce
from gradweave._runtime.claims import Technique
from gradweave._runtime.composition import refuse_conflicts
from gradweave._runtime.requirements import (
    refuse_sharded,
    refuse_wrapped,
    require_module,
    require_one_device,
    require_optimizer,
    require_shapes,
    require_undifferentiated,
)
from gradweave.compiler.planning import check_policy
from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.schedule.costs import Costs

Lowering = Literal["inductor", "replay"]
"""How a traced step is made to run."""
NewShapes = Literal["compile", "pad", "eager"]
"""How a batch of another shape than the first one is treated."""


def check_options(
    *,
    max_grad_norm: Any,
    max_grad_value: Any,
    scaler: Any,
    memory_budget: Any,
    costs: Costs | None,
    policy: Any,
    lower: Any,
    new_shapes: Any,
    variants: Any,
    averages: bool = False,
    reduce_dtype: Any = None,
) -> None:
    """Raise ArgumentError for options that mean nothing, by themselves or together."""
    if lower not in get_args(Lowering):
        raise ArgumentError("lower", lower, f"use one of {', '.join(get_args(Lowering))}")
    if new_shapes not in get_args(NewShapes):
        raise ArgumentError("new_shapes", new_shapes, f"use one of {', '.join(get_args(NewShapes))}")
    if memory_budget is not None and not (_is_number(memory_budget) and 0 <= memory_budget <= 1):
        raise ArgumentError("memory_budget", memory_budget, "give a share from 0 to 1, or None")
    if costs is not None and not isinstance(costs, Costs):
        raise ArgumentError("costs", type(costs).__name__, "give what measure_costs() returns, or None")
    check_policy(policy, averages=averages)
    if costs is not None and lower == "replay" and policy == "auto":
        raise ArgumentError(
            "costs",
            costs.name,
            'lower="replay" has one stream unless policy= names another; leave them out, or name it',
        )
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise ArgumentError("reduce_dtype", reduce_dtype, "give a floating point type, such as torch.bfloat16, or None")
    if costs is not None and averages:
        raise ArgumentError("costs", costs.name, "not with a mesh of several ranks; leave them out")
    if not isinstance(variants, int) or isinstance(variants, bool) or variants < 1:
        raise ArgumentError("variants", variants, "give at least 1")
    for name, limit in (("max_grad_norm", max_grad_norm), ("max_grad_value", max_grad_value)):
        if limit is not None and not (_is_number(limit) and limit > 0):
            raise ArgumentError(name, limit, "give a positive number, or None")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ArgumentError("scaler", type(scaler).__name__, "give a torch.amp.GradScaler, or None")


def check_loss_fn(loss_fn: Callable[..., Any]) -> None:
    """Raise ArgumentError for what cannot be called with a model and a batch."""
    example = "give a function such as lambda model, x, y: cross_entropy(model(x), y)"
    criterion = isinstance(loss_fn, CriterionModule) or (
        inspect.isfunction(loss_fn) and loss_fn.__module__ == nn.functional.__name__
    )
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if criterion:
        raise ArgumentError("loss_fn", name, f"is called with an output and a target, not with the model; {example}")
    if not callable(loss_fn):
        raise ArgumentError("loss_fn", name, example)
    try:
        inspect.signature(loss_fn).bind_partial(None)
    except TypeError as error:
        raise ArgumentError("loss_fn", name, f"takes no model; {example}") from error
    except ValueError:  # a callable that is not Python code has no signature
        return


def check_step(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise for models and optimizers that cannot be one graph, with the reason."""
    require_module(model)
    require_optimizer(
        optimizer,
        refused=(torch.optim.LBFGS, torch.optim.SparseAdam),
        remedy="it cannot be traced; use SGD, Adam, AdamW or another of torch.optim",
    )
    require_undifferentiated(optimizer)
    refuse_conflicts(Technique.COMPILE, model=model, optimizer=optimizer)
    if step_pre_hooks(optimizer):
        raise UnsupportedError(
            f"an optimizer {type(optimizer).__name__} with step hooks",
            "a graph runs the update without them, and they would see no gradients",
            "remove them",
        )
    refuse_wrapped(model)
    refuse_sharded(model)


def check_scaler(scaler: GradScaler | None, optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer that cannot be given scaled gradients."""
    if scaler is not None and getattr(optimizer, "needs_loss_scale", False):
        name = type(optimizer).__name__
        raise UnsupportedError(
            f"a GradScaler with {name}", f"it would scale what {name} measures in backward", "use bfloat16"
        )


def check_replica(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise for models and optimizers that cannot be averaged over ranks inside of a graph."""
    params = list(model.parameters())
    require_shapes(params)
    require_one_device([*params, *(p for group in optimizer.param_groups for p in group["params"])])


def announce_unaveraged() -> None:
    """Warn once where there are several ranks, over which nothing is averaged."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        announce(
            f"compile: there are {dist.get_world_size()} ranks, and each trains by itself; to average gradients over "
            "them, give mesh=, such as torch.distributed.group.WORLD",
            level=logging.WARNING,
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
