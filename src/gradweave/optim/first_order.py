"""The rule for parameters that no vector covers: SGD with momentum, or AdamW.

Both are guarded: where ``keep`` does not hold, on the device, nothing changes.
"""

from __future__ import annotations

from typing import Any

import torch

SGD, ADAMW = "sgd", "adamw"
RULES = (SGD, ADAMW)


def prepare(p: torch.Tensor, state: dict[str, Any], rule: str) -> None:
    """Makes the state that a parameter lacks."""
    keys = ("momentum_buffer",) if rule == SGD else ("exp_avg", "exp_avg_sq")
    for key in keys:
        if key not in state:
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
    if rule == ADAMW and "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)


def update(
    p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any], keep: torch.Tensor
) -> None:
    """Updates one parameter.

    Args:
        p: The parameter.
        grad: Its gradient, of the loss to be made small.
        state: As :func:`prepare` left it.
        group: Its hyperparameters.
        keep: Whether the update is to happen.
    """
    if group["rule"] == SGD:
        _sgd(p, grad, state, group, keep)
    else:
        _adamw(p, grad, state, group, keep)


def _sgd(p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any], keep: torch.Tensor) -> None:
    buffer = state["momentum_buffer"]
    new = buffer * group["momentum"] + grad + p * group["weight_decay"]
    buffer.copy_(torch.where(keep, new, buffer))
    p.sub_(torch.where(keep, buffer, torch.zeros_like(buffer)) * group["lr"])


def _adamw(
    p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any], keep: torch.Tensor
) -> None:
    first, second, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
    beta1, beta2 = group["betas"]
    first.copy_(torch.where(keep, first * beta1 + grad * (1 - beta1), first))
    second.copy_(torch.where(keep, second * beta2 + grad * grad * (1 - beta2), second))
    step.add_(keep.to(step.dtype))
    taken = step.clamp_min(1.0)
    mean = first / (1 - beta1**taken)
    size = (second / (1 - beta2**taken)).sqrt() + group["eps"]
    lr = group["lr"]
    change = (mean / size + p * group["weight_decay"]) * lr
    p.sub_(torch.where(keep, change, torch.zeros_like(change)).to(p.dtype))
