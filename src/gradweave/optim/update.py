"""Applying directions: momentum, weight decay and the step itself.

Where momentum comes first it adds up gradients, ``m = momentum * m + G``, and a layer's step is ``scale * (X - L Rᵀ)``
with ``X = G + momentum * m``, the gradient and what momentum will make of it. Otherwise it adds up
``scale * (G - L Rᵀ)``, and is the step. In the plain form, one tensor at a time, everything is pointwise, so that a
compiler makes one pass of it: that is what ``compile()`` traces. In the other one, eager kernels work on many tensors
at once. Where the step is to be left out, all factors are such that nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gradweave._compat.foreach import add_all, multiplied, multiply_all, multiply_each
from gradweave.optim.rules import Direction, Manner, Number


@dataclass
class Target:
    """A weight or a bias that is to be updated.

    Attributes:
        p: The parameter.
        grad: Its gradient as it is; of optimizers that make directions themselves, the direction.
        buffer: Its momentum.
        group: Its hyperparameters.
        factor: What the gradient is multiplied by: what a loss scale needs, and maximizing.
        scale: What the direction is multiplied by, as a whole or row by row.
        left: ``scale * L`` of what is taken off a weight, or all that is taken off a bias.
        right: ``Rᵀ`` of a weight.
        columns_first: Whether the weight is stored transposed.
    """

    p: torch.Tensor
    grad: torch.Tensor
    buffer: torch.Tensor
    group: dict[str, Any]
    factor: Number
    scale: Number
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None
    columns_first: bool = False


def column_of_bias(found: Direction, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """What is taken off a bias."""
    column = found.bias_right
    return None if column is None else (found.left * column[:, None] * scale).sum(-1).reshape(like.shape)


def is_plain(group: dict[str, Any]) -> bool:
    """Whether a group's tensors are updated one at a time."""
    return group["foreach"] is False


def apply_all(targets: list[Target], keep: torch.Tensor, manner: Manner) -> None:
    """Updates parameters, each as its group says: by itself or with many others."""
    together: dict[int, list[Target]] = {}
    for target in targets:
        if is_plain(target.group):
            _apply(target, keep, manner)
        else:
            together.setdefault(id(target.group), []).append(target)
    for members in together.values():
        _apply_many(members, keep, manner)


def _taken_off(target: Target) -> torch.Tensor | None:
    """What is taken off, by pointwise products."""
    left, right = target.left, target.right
    if left is None or right is None:
        return left
    total = left[..., 0, None] * right[:, 0, None]
    for rank in range(1, left.shape[-1]):
        total = total + left[..., rank, None] * right[:, rank, None]
    return (total.transpose(1, 2) if target.columns_first else total).reshape(target.p.shape)


def _factors(group: dict[str, Any], keep: torch.Tensor, manner: Manner) -> tuple[torch.Tensor, float, torch.Tensor]:
    """What momentum is multiplied by, what new directions are, and the rate; of a step that may be left out."""
    momentum = group["momentum"]
    kept = torch.where(keep, momentum * momentum if manner.nesterov_twice else momentum, 1.0)
    share = 1 + momentum if manner.nesterov_twice else 1.0
    return kept, share, torch.where(keep, group["lr"], 0.0)


def look_ahead(gradient: torch.Tensor, buffer: torch.Tensor, momentum: Number) -> torch.Tensor:
    """A gradient, with what momentum will make of it."""
    return gradient * (1 + momentum) + buffer * (momentum * momentum)


def times(gradient: torch.Tensor, factor: Number) -> torch.Tensor:
    """A gradient times a factor, which mostly is 1."""
    return gradient if isinstance(factor, float) and factor == 1.0 else gradient * factor


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """What steps, norms and vectors of a parameter are computed in: float32, or float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def new_momentum(p: torch.Tensor) -> torch.Tensor:
    """Momentum with nothing in it; of a parameter in float16 in float32, whose range gradients need."""
    dtype = torch.float32 if p.dtype == torch.float16 else p.dtype
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)


def _apply(target: Target, keep: torch.Tensor, manner: Manner) -> None:
    p, group, buffer = target.p, target.group, target.buffer
    decay, wide = group["weight_decay"], wide_dtype(p)
    kept, share, lr = _factors(group, keep, manner)
    fresh = times(target.grad.to(wide), target.factor)
    followed = look_ahead(fresh, buffer.to(wide), group["momentum"]) if manner.momentum_first else fresh
    step = followed * target.scale
    taken_off = _taken_off(target)
    if taken_off is not None:
        step = step - taken_off
    if not manner.decoupled and decay != 0:
        step = step + p * decay
    step = torch.where(keep, step, torch.zeros_like(step))
    added = torch.where(keep, fresh, torch.zeros_like(fresh)) if manner.momentum_first else step
    buffer.mul_(kept).add_((added * share).to(buffer.dtype))
    if manner.decoupled and decay != 0:
        p.mul_(1 - lr * decay)
    p.sub_(((step if manner.momentum_first else buffer) * lr).to(p.dtype))


def _apply_many(targets: list[Target], keep: torch.Tensor, manner: Manner) -> None:
    """The same for parameters of one group."""
    group = targets[0].group
    decay, momentum = group["weight_decay"], group["momentum"]
    params, buffers = [target.p for target in targets], [target.buffer for target in targets]
    wides = [wide_dtype(p) for p in params]
    kept, share, lr = _factors(group, keep, manner)
    fresh = [times(target.grad.to(wide), target.factor) for target, wide in zip(targets, wides, strict=True)]
    followed = fresh
    if manner.momentum_first:
        followed = multiplied(fresh, 1 + momentum)
        before = [buffer.to(wide) for buffer, wide in zip(buffers, wides, strict=True)]
        add_all(followed, multiplied(before, momentum * momentum))
    scales = [
        torch.as_tensor(target.scale, device=keep.device).to(wide) for target, wide in zip(targets, wides, strict=True)
    ]
    steps = multiply_each(followed, scales)
    for target, part in zip(targets, steps, strict=True):
        _take_off_in_place(part, target)
    if not manner.decoupled and decay != 0:
        add_all(steps, [p.to(wide) for p, wide in zip(params, wides, strict=True)], alpha=decay)
    steps = [torch.where(keep, part, torch.zeros_like(part)) for part in steps]
    added = [torch.where(keep, part, torch.zeros_like(part)) for part in fresh] if manner.momentum_first else steps
    multiply_all(buffers, kept)
    add_all(buffers, [part.to(buffer.dtype) for part, buffer in zip(added, buffers, strict=True)], alpha=share)
    if manner.decoupled and decay != 0:
        multiply_all(params, 1 - lr * decay)
    steps = multiply_each(steps if manner.momentum_first else buffers, [lr.to(wide) for wide in wides])
    add_all(params, [step.to(p.dtype) for step, p in zip(steps, params, strict=True)], alpha=-1.0)


def _take_off_in_place(part: torch.Tensor, target: Target) -> None:
    left, right = target.left, target.right
    if left is None:
        return
    if right is None:
        part.sub_(left)
        return
    columns = part.numel() // (left.shape[0] * left.shape[1])
    same = part.dtype == left.dtype and part.is_contiguous()
    if same and not target.columns_first:
        part.view(left.shape[0], left.shape[1], columns).baddbmm_(left, right, alpha=-1)
    else:
        product = torch.bmm(left, right)
        part.sub_((product.transpose(1, 2) if target.columns_first else product).reshape(part.shape))
