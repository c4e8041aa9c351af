"""Finding optimizers that do not treat parameters independently, before they do harm."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.compat.eager import own_step
from gradweave.errors import ArgumentError
from gradweave.fusion.stepping import PartialStepper

_STEPS = 3
_SIDE = 2


def check_independent(optimizer: Optimizer) -> None:
    """Raises unless stepping an optimizer in parts gives what stepping it whole gives, bit for bit.

    Two copies of the optimizer on tiny parameters take a few steps, one whole, one in two parts.
    A global norm, or one step counter for several parameters, makes them differ.
    """
    whole, in_parts = _tiny_copy(optimizer), _tiny_copy(optimizer)
    generator = torch.Generator().manual_seed(0)
    try:
        for _ in range(_STEPS):
            for one, other in zip(_params(whole), _params(in_parts), strict=True):
                one.grad = torch.randn(one.shape, generator=generator).to(one)
                other.grad = one.grad.clone()
            own_step(whole)(whole)
            for part in range(2):
                PartialStepper(in_parts).step(_subset(in_parts, part, 2))
            PartialStepper(in_parts).step_nothing()
    except Exception as error:
        raise ArgumentError(
            "optimizer",
            type(optimizer).__name__,
            f"cannot be stepped in parts ({type(error).__name__}: {error}); train without fuse()",
        ) from error
    if not _same(whole, in_parts):
        raise ArgumentError(
            "optimizer",
            type(optimizer).__name__,
            "couples its parameters (a norm over several, or one step count for several): updating them at "
            "different times would change the result; train without fuse()",
        )


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _subset(optimizer: Optimizer, part: int, parts: int) -> dict[int, list[nn.Parameter]]:
    """Every ``parts``-th parameter of each group."""
    chosen = {index: group["params"][part::parts] for index, group in enumerate(optimizer.param_groups)}
    return {index: params for index, params in chosen.items() if params}


def _tiny_copy(optimizer: Optimizer) -> Optimizer:
    """The optimizer on parameters of the same kind and number of dimensions, but two elements a side."""
    generator = torch.Generator().manual_seed(1)
    state: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
    replaced: dict[int, Any] = {id(optimizer.state): state}
    for p in _params(optimizer):
        tiny = torch.randn([min(_SIDE, side) for side in p.shape], generator=generator)
        replaced[id(p)] = nn.Parameter(tiny.to(device=p.device, dtype=p.dtype))
        if optimizer.state.get(p):
            state[replaced[id(p)]] = {key: _corner(value) for key, value in optimizer.state[p].items()}
    tiny_optimizer = copy.deepcopy(optimizer, replaced)
    for name, value in vars(optimizer).items():
        if name not in vars(tiny_optimizer) and name != "step":
            setattr(tiny_optimizer, name, value)
    return tiny_optimizer


def _corner(value: Any) -> Any:
    """The first elements of a tensor in each dimension; a copy of anything else."""
    if isinstance(value, torch.Tensor):
        return value[tuple(slice(_SIDE) for _ in value.shape)].clone()
    return copy.deepcopy(value)


def _same(one: Optimizer, other: Optimizer) -> bool:
    for p, q in zip(_params(one), _params(other), strict=True):
        if not torch.equal(p, q):
            return False
        mine, theirs = one.state.get(p, {}), other.state.get(q, {})
        if mine.keys() != theirs.keys():
            return False
        for key, value in mine.items():
            if isinstance(value, torch.Tensor):
                if not torch.equal(value, theirs[key]):
                    return False
            elif value != theirs[key]:
                return False
    return True
