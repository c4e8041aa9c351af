"""State and parameter groups of the optimizers: the keys of their checkpoints, and in which precision state is kept."""

from __future__ import annotations

from typing import Literal, TypedDict

import torch

from gradweave.optim.rules import Number

VECTORS: Literal["vectors"] = "vectors"
"""The rule of groups whose weights are preconditioned by vectors."""
SGD: Literal["sgd"] = "sgd"
ADAMW: Literal["adamw"] = "adamw"

FirstOrderRule = Literal["sgd", "adamw"]
"""A rule for parameters that have no vectors."""
GroupRule = Literal["vectors", "sgd", "adamw"]

FIRST_ORDER_RULES: tuple[FirstOrderRule, ...] = (SGD, ADAMW)


class ParameterState(TypedDict, total=False):
    """State of one parameter; which keys it has depends on its group's rule and on the optimizer.

    Attributes:
        momentum_buffer: Momentum, of all rules but AdamW.
        size: Norm of a weight in its first step, which measures the steps.
        record: Statistics since the last step (Eva, Eva-f): the sums of a layer's inputs, the number of places that
            they are of and, in the authors' modes of Eva, the sums of its outputs' gradients.
        input_vector: Running mean of a layer's inputs (Eva, Eva-f): groups by columns.
        output_vector: Leading direction of a layer's outputs or, in the authors' modes, the running mean of their
            gradients (Eva): groups by rows.
        columns_first: Whether the weight is stored transposed (Eva, Eva-f).
        mode_vectors: Running means of a gradient over all modes but one, concatenated (Eva-s).
        exp_avg: AdamW's first moment.
        exp_avg_sq: AdamW's second moment.
        step: AdamW's number of steps taken, on the device.
    """

    momentum_buffer: torch.Tensor
    size: torch.Tensor
    record: torch.Tensor
    input_vector: torch.Tensor
    output_vector: torch.Tensor
    columns_first: bool
    mode_vectors: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor


PRECISE_KEYS = ("record", "input_vector", "output_vector", "mode_vectors", "size", "exp_avg", "exp_avg_sq")
"""Keys of tensors that are kept in :func:`wide_dtype`, whatever the precision of their parameter."""


class ParameterGroup(TypedDict):
    """Hyperparameters of a group, besides its ``params``; :class:`~gradweave.optim.Eva` documents the most of them.

    Attributes:
        params: The parameters; under ``"vectors"`` weights, each followed by its bias if that belongs to its layer.
        rule: Which rule updates them.
        lr_ratio: Factor of ``lr``, by which groups of a first-order rule follow the same scheduler as others.
    """

    params: list[torch.Tensor]
    rule: GroupRule
    lr: Number
    lr_ratio: float
    damping: Number
    output_damping: Number | None
    momentum: Number
    weight_decay: Number
    running_average: Number
    kl_clip: Number
    first_order: FirstOrderRule
    first_order_lr: Number | None
    first_order_weight_decay: Number
    betas: tuple[Number, Number]
    eps: Number
    maximize: bool
    foreach: bool | None
    capturable: bool


ParameterInGroup = tuple[torch.Tensor, ParameterGroup]
"""A parameter without vectors, and its group."""


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the precision of a parameter's vectors, norms and steps: float32, or float64 for a float64 tensor."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def new_momentum(p: torch.Tensor) -> torch.Tensor:
    """Return a momentum of zeros; in float32 for a parameter in float16, whose range gradients leave."""
    dtype = torch.float32 if p.dtype == torch.float16 else p.dtype
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)


def learning_rate(group: ParameterGroup) -> Number:
    """Return the learning rate of a group: its ratio to ``lr``, which all groups share with schedulers and users."""
    lr, ratio = group["lr"], group.get("lr_ratio", 1.0)  # checkpoints of old have none
    return lr if ratio == 1.0 else lr * ratio
