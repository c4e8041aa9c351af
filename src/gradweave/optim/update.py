"""Applying directions: momentum, weight decay and the step itself; and the commit half of a two-phase step.

Where momentum comes first it adds up gradients, ``m = momentum * m + G``, and a layer's step is ``scale * (X - L Rᵀ)``
with ``X = G + momentum * m``, the gradient with a look-ahead as Nesterov's. Otherwise it adds up
``scale * (G - L Rᵀ)``, and is the step.

There are two forms. In the plain one, one tensor at a time, everything is pointwise, so that a compiler makes one pass
of it: that is what ``compile()`` traces. In the other one, eager kernels work on many tensors at once. Neither branches
on ``keep``, the flag on the device that says whether the step is taken, which would wait for the device: where it is
not set, all factors are such that nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradweave._compat.foreach import add_all, multiplied, multiply_all, multiply_each
from gradweave.optim import first_order
from gradweave.optim.rules import Direction, Number, UpdateRule
from gradweave.optim.state import ParameterGroup, ParameterState, wide_dtype


@dataclass(frozen=True)
class Target:
    """A layer's weight or bias that is to be updated.

    Attributes:
        p: The parameter.
        grad: Its gradient, which may be scaled.
        buffer: Its momentum.
        group: Its hyperparameters.
        factor: Factor of the gradient: the inverse loss scale, negative for maximizing.
        scale: Factor of the direction, as a whole or row by row.
        left: ``scale * L`` of the term that is subtracted from a weight, or the whole term of a bias.
        right: ``Rᵀ`` of a weight.
        columns_first: Whether the weight is stored transposed.
    """

    p: torch.Tensor
    grad: torch.Tensor
    buffer: torch.Tensor
    group: ParameterGroup
    factor: Number
    scale: Number
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None
    columns_first: bool = False


@dataclass(frozen=True)
class FirstOrderTarget:
    """A parameter without vectors that is to be updated, with what the first-order rule needs."""

    p: torch.Tensor
    grad: torch.Tensor
    state: ParameterState
    group: ParameterGroup


class PreparedStep:
    """The commit half of a two-phase step.

    Args:
        targets: Weights and biases of layers.
        first_order_targets: All other parameters.
        keep: Whether the step is taken, on the device.
        inverse: The inverse loss scale, for gradients of the first-order rule.
        rule: The optimizer's rule.
    """

    def __init__(
        self,
        targets: list[Target],
        first_order_targets: list[FirstOrderTarget],
        keep: torch.Tensor,
        inverse: Number,
        rule: UpdateRule,
    ) -> None:
        self._left: dict[int, Target | FirstOrderTarget] = {id(target.p): target for target in targets}
        self._left |= {id(target.p): target for target in first_order_targets}
        self._keep = keep
        self._inverse = inverse
        self._rule = rule

    def commit(self, params: Sequence[torch.Tensor] | None = None) -> None:
        """Update the given parameters, or all, and release their gradients.

        A parameter's result does not depend on which others are updated with it. If one fails, the others' updates are
        not repeated by the next call.
        """
        chosen = [id(p) for p in params if id(p) in self._left] if params is not None else list(self._left)
        targets = [target for key in chosen if isinstance(target := self._left[key], Target)]
        apply_all(targets, self._keep, self._rule)
        for target in targets:
            del self._left[id(target.p)]
        for key in chosen:
            one = self._left.get(key)
            if isinstance(one, FirstOrderTarget):
                factor = -self._inverse if one.group["maximize"] else self._inverse
                grad = times(one.grad.to(wide_dtype(one.p)), factor)
                first_order.update(one.p, grad, one.state, one.group, self._keep)
                del self._left[key]


def bias_term(found: Direction, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """Return the term that is subtracted from a bias, in its shape."""
    column = found.bias_right
    return None if column is None else (found.left * column[:, None] * scale).sum(-1).reshape(like.shape)


def is_plain(group: ParameterGroup) -> bool:
    """Return whether a group's tensors are updated one at a time."""
    return group["foreach"] is False


def apply_all(targets: list[Target], keep: torch.Tensor, rule: UpdateRule) -> None:
    """Update parameters, each as its group says: by itself or with many others."""
    together: dict[int, list[Target]] = {}
    for target in targets:
        if is_plain(target.group):
            _apply(target, keep, rule)
        else:
            together.setdefault(id(target.group), []).append(target)
    for members in together.values():
        _apply_many(members, keep, rule)


def look_ahead(gradient: torch.Tensor, buffer: torch.Tensor, momentum: Number) -> torch.Tensor:
    """Return ``G + momentum * (momentum * m + G)``: a gradient with a look-ahead as Nesterov's."""
    return gradient * (1 + momentum) + buffer * (momentum * momentum)


def times(gradient: torch.Tensor, factor: Number) -> torch.Tensor:
    """Return a gradient times a factor, which usually is 1 and then costs nothing."""
    return gradient if isinstance(factor, float) and factor == 1.0 else gradient * factor


def _factors(
    group: ParameterGroup, keep: torch.Tensor, rule: UpdateRule
) -> tuple[torch.Tensor, float | torch.Tensor, torch.Tensor]:
    """Return the factors of the old momentum and of what is added to it, and the rate; all of them on the device."""
    momentum = group["momentum"]
    kept = torch.where(keep, momentum * momentum if rule.nesterov_twice else momentum, 1.0)
    share = 1 + momentum if rule.nesterov_twice else 1.0
    return kept, share, torch.where(keep, group["lr"], 0.0)


def _apply(target: Target, keep: torch.Tensor, rule: UpdateRule) -> None:
    """Update one parameter by pointwise operations."""
    p, group, buffer = target.p, target.group, target.buffer
    decay, wide = group["weight_decay"], wide_dtype(p)
    kept, share, lr = _factors(group, keep, rule)
    fresh = times(target.grad.to(wide), target.factor)
    followed = look_ahead(fresh, buffer.to(wide), group["momentum"]) if rule.momentum_first else fresh
    step = followed * target.scale
    term = _pointwise_term(target)
    if term is not None:
        step = step - term
    if not rule.decoupled and decay != 0:
        step = step + p * decay
    # A gradient that is not finite makes NaNs here, and 0 * NaN is NaN: selected away, not multiplied.
    step = torch.where(keep, step, torch.zeros_like(step))
    added = torch.where(keep, fresh, torch.zeros_like(fresh)) if rule.momentum_first else step
    buffer.mul_(kept).add_((added * share).to(buffer.dtype))
    if rule.decoupled and decay != 0:
        p.mul_(1 - lr * decay)
    p.sub_(((step if rule.momentum_first else buffer) * lr).to(p.dtype))


def _pointwise_term(target: Target) -> torch.Tensor | None:
    """Return ``L Rᵀ`` in the parameter's shape, by pointwise products."""
    left, right = target.left, target.right
    if left is None or right is None:
        return left
    total = left[..., 0, None] * right[:, 0, None]
    for rank in range(1, left.shape[-1]):
        total = total + left[..., rank, None] * right[:, rank, None]
    return (total.transpose(1, 2) if target.columns_first else total).reshape(target.p.shape)


def _apply_many(targets: list[Target], keep: torch.Tensor, rule: UpdateRule) -> None:
    """Update parameters of one group as :func:`_apply` does, many tensors to an operation."""
    group = targets[0].group
    decay, momentum = group["weight_decay"], group["momentum"]
    params, buffers = [target.p for target in targets], [target.buffer for target in targets]
    wides = [wide_dtype(p) for p in params]
    kept, share, lr = _factors(group, keep, rule)
    fresh = [times(target.grad.to(wide), target.factor) for target, wide in zip(targets, wides, strict=True)]
    followed = fresh
    if rule.momentum_first:
        followed = multiplied(fresh, 1 + momentum)
        before = [buffer.to(wide) for buffer, wide in zip(buffers, wides, strict=True)]
        add_all(followed, multiplied(before, momentum * momentum))
    scales = [
        torch.as_tensor(target.scale, device=keep.device).to(wide) for target, wide in zip(targets, wides, strict=True)
    ]
    steps = multiply_each(followed, scales)
    for target, step in zip(targets, steps, strict=True):
        _subtract_term(step, target)
    if not rule.decoupled and decay != 0:
        add_all(steps, [p.to(wide) for p, wide in zip(params, wides, strict=True)], alpha=decay)
    steps = [torch.where(keep, step, torch.zeros_like(step)) for step in steps]
    added = [torch.where(keep, one, torch.zeros_like(one)) for one in fresh] if rule.momentum_first else steps
    multiply_all(buffers, kept)
    add_all(buffers, [one.to(buffer.dtype) for one, buffer in zip(added, buffers, strict=True)], alpha=share)
    if rule.decoupled and decay != 0:
        multiply_all(params, 1 - lr * decay)
    steps = multiply_each(steps if rule.momentum_first else buffers, [lr.to(wide) for wide in wides])
    add_all(params, [step.to(p.dtype) for step, p in zip(steps, params, strict=True)], alpha=-1.0)


def _subtract_term(step: torch.Tensor, target: Target) -> None:
    """Subtract ``L Rᵀ`` from a step, in place."""
    left, right = target.left, target.right
    if left is None:
        return
    if right is None:
        step.sub_(left)
        return
    columns = step.numel() // (left.shape[0] * left.shape[1])
    same = step.dtype == left.dtype and step.is_contiguous()
    if same and not target.columns_first:
        step.view(left.shape[0], left.shape[1], columns).baddbmm_(left, right, alpha=-1)
    else:
        product = torch.bmm(left, right)
        step.sub_((product.transpose(1, 2) if target.columns_first else product).reshape(step.shape))
