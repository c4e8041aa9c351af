"""Applying directions: momentum, weight decay and the step itself.

A layer's momentum becomes ``momentum * m + scale * (G - L Rᵀ)``, and its step is that, or looks ahead as Nesterov's
does: ``momentum`` times it, and the new direction once more. In the plain form, one tensor at a
time, everything is pointwise, so that a compiler makes one pass of it: that is what ``compile()`` traces.
In the other one, eager kernels work on many tensors at once. Where the step is to be left out, all
factors are such that nothing changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gradweave.compat.optim import add_all, multiply_all, multiply_each
from gradweave.optim.rules import Direction, Manner, Number


@dataclass
class Target:
    """A weight or a bias that is to be updated.

    Attributes:
        p: The parameter.
        grad: Its gradient as it is.
        buffer: Its momentum.
        group: Its hyperparameters.
        scale: What the gradient is multiplied by, as a whole or row by row.
        left: ``scale * L`` of what is taken off a weight, or all that is taken off a bias.
        right: ``Rᵀ`` of a weight.
        columns_first: Whether the weight is stored transposed.
    """

    p: torch.Tensor
    grad: torch.Tensor
    buffer: torch.Tensor
    group: dict[str, Any]
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


def _apply(target: Target, keep: torch.Tensor, manner: Manner) -> None:
    p, group, buffer = target.p, target.group, target.buffer
    decay = group["weight_decay"]
    kept, share, lr = _factors(group, keep, manner)
    added = target.grad * target.scale
    taken_off = _taken_off(target)
    if taken_off is not None:
        added = added - taken_off
    if not manner.decoupled and decay != 0:
        added = added + p * decay
    added = torch.where(keep, added, torch.zeros_like(added)).to(buffer.dtype)
    buffer.mul_(kept).add_(added * share)
    if manner.decoupled and decay != 0:
        p.mul_(1 - lr * decay)
    step = buffer * group["momentum"] + added if manner.nesterov else buffer
    p.sub_((step * lr).to(p.dtype))


def _apply_many(targets: list[Target], keep: torch.Tensor, manner: Manner) -> None:
    """The same for parameters of one group."""
    group = targets[0].group
    decay = group["weight_decay"]
    params, buffers = [target.p for target in targets], [target.buffer for target in targets]
    kept, share, lr = _factors(group, keep, manner)
    scales = [torch.as_tensor(target.scale, device=keep.device).to(target.grad.dtype) for target in targets]
    added = multiply_each([target.grad for target in targets], scales)
    for target, part in zip(targets, added, strict=True):
        _take_off_in_place(part, target)
    if not manner.decoupled and decay != 0:
        add_all(added, params, alpha=decay)
    added = [torch.where(keep, part, torch.zeros_like(part)) for part in added]
    multiply_all(buffers, kept)
    add_all(buffers, added, alpha=share)
    if manner.decoupled and decay != 0:
        multiply_all(params, 1 - lr * decay)
    steps = buffers
    if manner.nesterov:
        ahead = torch.as_tensor(group["momentum"], device=keep.device)
        steps = multiply_each(buffers, [ahead.to(buffer.dtype) for buffer in buffers])
        add_all(steps, added)
    add_all(params, multiply_each(steps, [lr.to(buffer.dtype) for buffer in buffers]), alpha=-1.0)


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
