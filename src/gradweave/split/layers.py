"""Linear and convolution with the two parts of their backward apart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional

from gradweave.split.queue import Gradients, Task
from gradweave.split.taps import Tap

aten = torch.ops.aten


def split_linear(x: torch.Tensor, tap: Tap) -> torch.Tensor:
    """As ``functional.linear``, the weight gradient left in the tap.

    Weight and bias are used in the input's precision, their gradients are in their own: as autocast has it.
    """
    result: torch.Tensor = _Linear.apply(tap, x, tap.weight, tap.bias)  # type: ignore[no-untyped-call]
    return result


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, tap: Tap, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.tap = tap
        ctx.flattens = x.dim() > 1 and bias is not None and x.is_contiguous()
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        return functional.linear(x, low, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        of_x = None
        if needs_x:
            of_x = _linear_input(grad, x, weight)
        if not (needs_weight or needs_bias):
            return None, of_x, None, None
        compute = partial(
            _linear_weight, grad, x, ctx.dtypes, needs_weight, needs_bias, ctx.flattens, _is_packed(weight.t())
        )
        if torch.is_grad_enabled():
            return None, of_x, *compute()
        ctx.tap.leave(Task(ctx.tap.layer, (grad,), compute))
        return None, of_x, None, None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _is_packed(matrix: torch.Tensor) -> bool:
    """Whether a matrix lies in memory column by column."""
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0]


def _linear_input(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The input gradient, laid out as autograd does it."""
    if x.dim() != 2:
        return (_rows(grad) @ weight).view(x.shape)
    return (weight.t() @ grad.t()).t() if _is_packed(x) else grad @ weight


def _linear_weight(
    grad: torch.Tensor,
    x: torch.Tensor,
    dtypes: tuple[Any, Any],
    weight: bool,
    bias: bool,
    flattens: bool,
    packed: bool,
) -> Gradients:
    rows = _rows(grad)
    of_bias = None
    if bias:
        of_bias = rows.sum(0) if flattens or grad.dim() == 2 else grad.sum(tuple(range(grad.dim() - 1)))
        of_bias = of_bias.to(dtypes[1])
    of_weight = None
    if weight:
        of_weight = rows.t() @ _rows(x) if packed else (_rows(x).t() @ rows).t()
        of_weight = of_weight.to(dtypes[0])
    return of_weight, of_bias


@dataclass(frozen=True)
class Geometry:
    """How a convolution goes over its input; the arguments of ``aten::convolution`` behind the bias."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def arguments(self) -> tuple[Any, ...]:
        """In the order in which they are given."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups


def split_convolution(x: torch.Tensor, tap: Tap, geometry: Geometry) -> torch.Tensor:
    """As ``aten::convolution``, the weight gradient left in the tap."""
    result: torch.Tensor = _Convolution.apply(tap, geometry, x, tap.weight, tap.bias)  # type: ignore[no-untyped-call]
    return result


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any, tap: Tap, geometry: Geometry, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.tap = tap
        ctx.geometry = geometry
        ctx.bias_sizes = None if bias is None else tuple(bias.shape)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        low_bias = None if bias is None else bias.to(x.dtype)
        result: torch.Tensor = aten.convolution(x, low, low_bias, *geometry.arguments())
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        _, _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        backward = partial(aten.convolution_backward, grad, x, weight, ctx.bias_sizes, *ctx.geometry.arguments())
        of_x = backward([True, False, False])[0] if needs_x else None
        if not (needs_weight or needs_bias):
            return None, None, of_x, None, None

        def compute() -> Gradients:
            _, of_weight, of_bias = backward([False, needs_weight, needs_bias])
            return (
                of_weight.to(ctx.dtypes[0]) if needs_weight else None,
                of_bias.to(ctx.dtypes[1]) if needs_bias else None,
            )

        if torch.is_grad_enabled():
            return None, None, of_x, *compute()
        ctx.tap.leave(Task(ctx.tap.layer, (grad,), compute))
        return None, None, of_x, None, None
