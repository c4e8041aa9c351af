"""The rule for parameters that no vector covers: SGD with momentum, or AdamW.

Both are guarded by ``keep``, a flag on the device: where it is not set, nothing changes. Arithmetic, and AdamW's state,
are in float32 whatever the parameter's precision: squares of gradients, and what they lose in a step, are too small for
less.
"""

from __future__ import annotations

import torch

from gradweave.optim.state import (
    SGD,
    FirstOrderRule,
    ParameterGroup,
    ParameterState,
    learning_rate,
    new_momentum,
    wide_dtype,
)


def prepare(p: torch.Tensor, state: ParameterState, rule: FirstOrderRule) -> None:
    """Create the state that a parameter lacks."""
    if rule == SGD:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = new_momentum(p)
        return
    for key in ("exp_avg", "exp_avg_sq"):
        if key not in state:
            state[key] = torch.zeros_like(p, dtype=wide_dtype(p), memory_format=torch.preserve_format)
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)


def update(
    p: torch.Tensor, grad: torch.Tensor, state: ParameterState, group: ParameterGroup, keep: torch.Tensor
) -> None:
    """Update one parameter.

    Args:
        p: The parameter.
        grad: Its gradient of the loss to be minimized, in the precision to compute in.
        state: Its state, after :func:`prepare`.
        group: Its hyperparameters.
        keep: Whether the update is to happen.
    """
    if group["rule"] == SGD:
        _sgd(p, grad, state, group, keep)
    else:
        _adamw(p, grad, state, group, keep)


def _sgd(p: torch.Tensor, grad: torch.Tensor, state: ParameterState, group: ParameterGroup, keep: torch.Tensor) -> None:
    buffer = state["momentum_buffer"]
    old = buffer.to(grad.dtype)
    new = old * group["momentum"] + grad + p.to(grad.dtype) * group["weight_decay"]
    buffer.copy_(torch.where(keep, new, old))
    p.sub_((torch.where(keep, new, torch.zeros_like(new)) * learning_rate(group)).to(p.dtype))


def _adamw(
    p: torch.Tensor, grad: torch.Tensor, state: ParameterState, group: ParameterGroup, keep: torch.Tensor
) -> None:
    first, second, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
    beta1, beta2 = group["betas"]
    first.copy_(torch.where(keep, first * beta1 + grad * (1 - beta1), first))
    second.copy_(torch.where(keep, second * beta2 + grad * grad * (1 - beta2), second))
    step.add_(keep.to(step.dtype))
    taken = step.clamp_min(1.0)
    mean = first / (1 - beta1**taken)
    size = (second / (1 - beta2**taken)).sqrt() + group["eps"]
    change = (mean / size + p.to(grad.dtype) * group["weight_decay"]) * learning_rate(group)
    p.sub_(torch.where(keep, change, torch.zeros_like(change)).to(p.dtype))
