"""Linear and convolution with the two parts of their backward apart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.nn import functional

from gradweave._compat.eager import no_torch_function
from gradweave._runtime.split_calls.taps import Pending, Tap
from gradweave._runtime.split_calls.task import Gradients, Task

aten = torch.ops.aten


def split_linear(x: torch.Tensor, tap: Tap) -> torch.Tensor:
    """As ``functional.linear``, in the input's precision, the weight gradient left in the tap."""
    weight, bias = tap.used_as(x.dtype)
    shape = x.shape
    flattens = x.dim() > 2 and x.is_contiguous()
    if flattens:
        x = x.view(-1, shape[-1])
    result: torch.Tensor = _Linear.apply(tap.pending, x, weight, bias)  # type: ignore[no-untyped-call]
    return result.view(*shape[:-1], weight.shape[0]) if flattens else result


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, pending: Pending, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.pending = pending
        ctx.packed = _is_packed(weight.t())
        needs_x = ctx.needs_input_grad[1]
        ctx.save_for_backward(x, weight if needs_x else None)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        if needs_x and torch.is_grad_enabled():
            weight = ctx.pending.in_derivatives(weight, of_call=True)
        of_x = _linear_input(grad, x, weight) if needs_x else None
        if not (needs_weight or needs_bias):
            return None, of_x, None, None
        if torch.is_grad_enabled():
            return None, of_x, *_linear_weight(grad, x, needs_weight, needs_bias, ctx.packed)
        x, made_by_model = _own(x, ctx.pending)
        compute = partial(_linear_weight, grad, x, needs_weight, needs_bias, ctx.packed)
        ctx.pending.leave(Task(ctx.pending.layer, (grad,), compute, made_by_model))
        return None, of_x, None, None


def _own(x: torch.Tensor, pending: Pending) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """An input without the graph behind it; once more if the forward has computed it and its task may outlive that.

    A batch, which the loop may fill again, is not one of these.
    """
    if not pending.may_outlive or x.is_leaf:
        return x, ()
    x = x.detach()
    return x, (x,)


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


def _linear_weight(grad: torch.Tensor, x: torch.Tensor, weight: bool, bias: bool, packed: bool) -> Gradients:
    of_weight = of_bias = None
    if weight:
        rows = _rows(grad)
        of_weight = rows.t() @ _rows(x) if packed else (_rows(x).t() @ rows).t()
    if bias:
        of_bias = grad.sum(tuple(range(grad.dim() - 1)))
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


class _Leaf(NamedTuple):
    """A leaf, out of autograd's sight."""

    tensor: torch.Tensor


def split_convolution(x: torch.Tensor, tap: Tap, geometry: Geometry, leaf: torch.Tensor) -> torch.Tensor:
    """As ``aten::convolution``, in the input's precision, the weight gradient left in the tap."""
    weight, bias = tap.used_as(x.dtype)
    kept = _Leaf(leaf) if leaf.is_leaf and leaf.dtype is x.dtype else None
    result: torch.Tensor = _Convolution.apply(tap.pending, geometry, x, weight, bias, kept)  # type: ignore[no-untyped-call]
    return result


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        pending: Pending,
        geometry: Geometry,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        leaf: _Leaf | None,
    ) -> torch.Tensor:
        ctx.pending = pending
        ctx.leaf = leaf
        ctx.geometry = geometry
        ctx.bias_sizes = None if bias is None else tuple(bias.shape)
        ctx.save_for_backward(x, weight)
        result: torch.Tensor = aten.convolution(x, weight, bias, *geometry.arguments())
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        _, _, needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if ctx.leaf is not None and not torch.is_grad_enabled():
            with no_torch_function():  # autograd keeps a leaf itself: what was put into its .data since is what it uses
                weight = ctx.leaf.tensor.detach()

        def backward(x: torch.Tensor, weight: torch.Tensor, mask: list[bool]) -> Any:
            return aten.convolution_backward(grad, x, weight, ctx.bias_sizes, *ctx.geometry.arguments(), mask)

        if torch.is_grad_enabled():  # all at once, as torch does it: derivatives of these are computed from there
            mask = [needs_x, needs_weight, needs_bias]
            made = backward(x, ctx.pending.in_derivatives(weight, of_call=False), mask)
            return (
                None,
                None,
                *(gradient if needed else None for gradient, needed in zip(made, mask, strict=True)),
                None,
            )
        of_x = backward(x, weight, [True, False, False])[0] if needs_x else None
        if not (needs_weight or needs_bias):
            return None, None, of_x, None, None, None
        mask = [False, needs_weight, needs_bias]
        x, made_by_model = _own(x, ctx.pending)
        compute = partial(_convolution_weight, grad, x, weight.detach(), ctx.bias_sizes, ctx.geometry, mask)
        ctx.pending.leave(Task(ctx.pending.layer, (grad,), compute, made_by_model))
        return None, None, of_x, None, None, None


def _convolution_weight(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, geometry: Geometry, mask: list[bool]
) -> Gradients:
    made = aten.convolution_backward(grad, x, weight, bias_sizes, *geometry.arguments(), mask)
    return made[1] if mask[1] else None, made[2] if mask[2] else None
