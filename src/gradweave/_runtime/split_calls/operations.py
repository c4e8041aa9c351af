"""Autograd functions of linear and convolution whose backward leaves the weight gradient as a task."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.nn import functional

from gradweave._compat.functions import no_torch_function
from gradweave._runtime.split_calls.task import Gradients, Task
from gradweave._runtime.split_calls.weights import CallWeights, GradientSink

aten = torch.ops.aten


def split_linear(x: torch.Tensor, weights: CallWeights) -> torch.Tensor:
    """Return ``functional.linear`` in the input's precision; its backward leaves the weight gradient in the sink."""
    weight, bias = weights.use(x.dtype)
    shape = x.shape
    # As torch does it: the rows of a contiguous input are one matrix product, not a batch of products.
    flattens = x.dim() > 2 and x.is_contiguous()
    if flattens:
        x = x.view(-1, shape[-1])
    result: torch.Tensor = _Linear.apply(weights.sink, x, weight, bias)  # type: ignore[no-untyped-call]
    return result.view(*shape[:-1], weight.shape[0]) if flattens else result


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, sink: GradientSink, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.sink = sink
        # Autograd's formulas for matrix products choose by the layout of an operand whether they compute the product or
        # that of the transposes; the gradient's strides show which.
        ctx.is_packed = _is_packed(weight.t())
        needs_x = ctx.needs_input_grad[1]
        ctx.save_for_backward(x, weight if needs_x else None)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        if needs_x and torch.is_grad_enabled():
            weight = ctx.sink.differentiable(weight, of_call=True)
        of_x = _linear_input(grad, x, weight) if needs_x else None
        if not (needs_weight or needs_bias):
            return None, of_x, None, None
        if torch.is_grad_enabled():  # create_graph: a task would be out of the sight of the backward of this backward
            return None, of_x, *_linear_weight(grad, x, needs_weight, needs_bias, ctx.is_packed)
        x, activations = _kept_input(x, ctx.sink)
        compute = partial(_linear_weight, grad, x, needs_weight, needs_bias, ctx.is_packed)
        ctx.sink.add(Task(ctx.sink.layer, (grad,), compute, activations))
        return None, of_x, None, None


def _kept_input(x: torch.Tensor, sink: GradientSink) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return an input as a task keeps it, and the activations by which the task may outlive its backward.

    A leaf is not one of them: it may be a batch, which the loop may fill again.
    """
    if not sink.may_outlive_backward or x.is_leaf:
        return x, ()
    x = x.detach()  # or the task would keep the graph below this call alive
    return x, (x,)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _is_packed(matrix: torch.Tensor) -> bool:
    """Return whether a matrix lies in memory column by column."""
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0]


def _linear_input(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the input gradient in the layout that autograd gives it."""
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
    """The arguments of ``aten::convolution`` after the bias."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def arguments(self) -> tuple[Any, ...]:
        """Return them in their order."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups


class _HiddenLeaf(NamedTuple):
    """A leaf among the arguments of a Function that autograd does not see: Functions look for tensors only."""

    tensor: torch.Tensor


def split_convolution(
    x: torch.Tensor, weights: CallWeights, geometry: Geometry, original: torch.Tensor
) -> torch.Tensor:
    """Return ``aten::convolution`` in the input's precision; its backward leaves the weight gradient in the sink.

    Args:
        x: The input.
        weights: Weight and bias.
        geometry: The other arguments.
        original: The weight as the model has it.
    """
    weight, bias = weights.use(x.dtype)
    hidden = _HiddenLeaf(original) if original.is_leaf and original.dtype is x.dtype else None
    result: torch.Tensor = _Convolution.apply(weights.sink, geometry, x, weight, bias, hidden)  # type: ignore[no-untyped-call]
    return result


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        sink: GradientSink,
        geometry: Geometry,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        leaf: _HiddenLeaf | None,
    ) -> torch.Tensor:
        ctx.sink = sink
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
            # Autograd saves a leaf itself, not an alias of its memory: a stock backward uses a tensor that was put into
            # its .data since. Reading the leaf must not apply an update that is pending on it.
            with no_torch_function():
                weight = ctx.leaf.tensor.detach()

        def backward(x: torch.Tensor, weight: torch.Tensor, mask: list[bool]) -> Any:
            return aten.convolution_backward(grad, x, weight, ctx.bias_sizes, *ctx.geometry.arguments(), mask)

        if torch.is_grad_enabled():  # in one call, as torch does it: the double backward of that call has its bits
            mask = [needs_x, needs_weight, needs_bias]
            made = backward(x, ctx.sink.differentiable(weight, of_call=False), mask)
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
        x, activations = _kept_input(x, ctx.sink)
        compute = partial(_convolution_weight, grad, x, weight.detach(), ctx.bias_sizes, ctx.geometry, mask)
        ctx.sink.add(Task(ctx.sink.layer, (grad,), compute, activations))
        return None, None, of_x, None, None, None


def _convolution_weight(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, geometry: Geometry, mask: list[bool]
) -> Gradients:
    made = aten.convolution_backward(grad, x, weight, bias_sizes, *geometry.arguments(), mask)
    return made[1] if mask[1] else None, made[2] if mask[2] else None
