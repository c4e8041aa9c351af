"""Operations that take a Python number, written with a tensor in its place.

A number in a compiled or captured graph is a constant; a tensor can change from step to step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from gradweave._compat.tensors import ITEM
from gradweave._compat.tracing import MATH_OF_SYMBOLS
from gradweave.errors import GradweaveError

aten = torch.ops.aten


def _scaled_sum(x: Any, other: Any, *, alpha: Any = 1) -> Any:
    return x + other * alpha


def _scaled_difference(x: Any, other: Any, *, alpha: Any = 1) -> Any:
    return x - other * alpha


def _lerp(x: Any, end: Any, weight: Any) -> Any:
    return x + weight * (end - x)


def _addcmul(x: Any, one: Any, other: Any, *, value: Any = 1) -> Any:
    return x + value * (one * other)


def _addcdiv(x: Any, one: Any, other: Any, *, value: Any = 1) -> Any:
    return x + value * (one / other)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _scaled_sum,
    aten.sub.Tensor: _scaled_difference,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.rsub.Scalar: lambda x, other, alpha=1: other - alpha * x,
    aten.lerp.Scalar: _lerp,
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.pow.Scalar: torch.pow,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.pow.Tensor_Tensor: torch.pow,
    aten.where.ScalarSelf: torch.where,
    aten.where.ScalarOther: torch.where,
    aten.where.Scalar: torch.where,
    **{getattr(aten, name).Scalar: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    aten.clamp_min.default: torch.maximum,
    aten.clamp_max.default: torch.minimum,
    aten.clamp.default: lambda x, low=None, high=None: _clamp(x, low, high),
    aten.scalar_tensor.default: lambda number, **_: number * 1,
    ITEM: lambda x: x.to(torch.float64),
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.truediv: operator.truediv,
    operator.pow: operator.pow,
    operator.neg: operator.neg,
    torch.sym_float: lambda x: x,
    **{MATH_OF_SYMBOLS[name]: getattr(torch, name) for name in ("sqrt", "cos", "sin", "log2")},
    torch.sym_max: lambda a, b: _extreme(torch.maximum, a, b),
    torch.sym_min: lambda a, b: _extreme(torch.minimum, a, b),
}
IN_PLACE: dict[Any, Any] = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.lerp_.Scalar: aten.lerp.Scalar,
    aten.addcmul_.default: aten.addcmul.default,
    aten.addcdiv_.default: aten.addcdiv.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.clamp_min_.default: aten.clamp_min.default,
    aten.clamp_max_.default: aten.clamp_max.default,
    aten.clamp_.default: aten.clamp.default,
    aten.copy_.default: None,
    aten.fill_.Scalar: None,
}
"""In-place operations, and the ones that compute the new value; None where that is the second argument."""


def _clamp(x: Any, low: Any, high: Any) -> Any:
    x = x if low is None else torch.maximum(x, torch.as_tensor(low, dtype=x.dtype, device=x.device))
    return x if high is None else torch.minimum(x, torch.as_tensor(high, dtype=x.dtype, device=x.device))


def _extreme(which: Callable[..., Any], a: Any, b: Any) -> Any:
    """Return the larger or smaller of a tensor and a number, or of two tensors; they may be traced."""
    number, tensor = (a, b) if isinstance(a, (int, float)) else (b, a)
    if isinstance(number, (int, float)):
        return (torch.clamp_min if which is torch.maximum else torch.clamp_max)(tensor, number)
    return which(a, b)


def new_value(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation on tensors that was traced on numbers.

    Args:
        target: The operation; for an in-place one the result is the new value of its first argument.
        args: Its arguments.
        kwargs: Its arguments by name.

    Raises:
        GradweaveError: If it has no form with tensors.
    """
    if target in IN_PLACE:
        target = IN_PLACE[target]
        if target is None:
            return args[1]
    function = FUNCTIONS.get(target)
    if function is None:
        raise GradweaveError(
            f"the optimizer's step gives a hyperparameter to {target}, which cannot be taken into a compiled graph; "
            'use lower="replay"'
        )
    return function(*args, **kwargs)
