"""Interception of the linear and convolution calls of a forward, wherever they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

from gradweave._compat.autograd import saved_tensors_are_hooked
from gradweave._compat.functions import (
    in_forward_mode,
    in_function_transform,
    is_being_traced,
    other_function_modes,
    part_by_part,
)
from gradweave._runtime.interception import WeightGradientSplitter, apply_pending_updates
from gradweave._runtime.split_calls.autocast_cache import autocast_dtype, is_cast_once
from gradweave._runtime.split_calls.operations import Geometry, split_convolution, split_linear
from gradweave._runtime.split_calls.weights import ForwardWeights

_DIMENSIONS = {
    functional.conv1d: 1, functional.conv2d: 2, functional.conv3d: 3,
    functional.conv_transpose1d: 1, functional.conv_transpose2d: 2, functional.conv_transpose3d: 3,
}  # fmt: skip
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ATTENTION = functional.multi_head_attention_forward
_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
_PREPARED = {
    *(getattr(torch, name) for name in ("t", "transpose", "mul", "add", "sub", "div")),
    *(
        getattr(torch.Tensor, name)
        for name in (
            *("to", "type", "float", "double", "half", "bfloat16", "t", "transpose", "view", "reshape"),
            *("mul", "add", "sub", "div", "__mul__", "__rmul__"),
        )
    ),
    *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT")),
}
"""Operations that a model may prepare a weight with, for uses other than the layer's own call; autocast casts none."""


class CallSplitter(WeightGradientSplitter):
    """A context in which the backward of linear and convolution calls leaves weight gradients as tasks.

    Everything that it does not know runs stock: weights that need no gradient, calls with autograd switched off, under
    function transforms or while traced, inputs that are not dense tensors. So do checkpointed layers: they run again in
    backward, outside of this context, and must save the same tensors there.

    Args:
        weights: Weights of the forward that runs in this context.

    Attributes:
        is_closed: Whether everything runs stock from now on. A context that another one surrounds cannot be left.
    """

    def __init__(self, weights: ForwardWeights) -> None:
        super().__init__()
        self.is_closed = False
        self._weights = weights

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one of torch's functions: torch calls this for each of them."""
        kwargs = kwargs or {}
        if self.is_closed or torch.compiler.is_compiling():
            result = None
        elif func is functional.linear:
            result = self._linear(*args, **kwargs)
        elif func in _DIMENSIONS:
            result = self._convolution(func, *args, **kwargs)
        elif func is _ATTENTION and _can_be_taken_apart(func, *args, *kwargs.values()):
            with self:  # torch disables a mode inside of its own handler: the projections' calls must come here
                result = part_by_part(func)(*args, **kwargs)
        elif func is functional.embedding:
            result = self._embedding(*args, **kwargs)
        elif func in _PREPARED and any(map(self._weights.has_stand_in, args)):
            return func(*map(self._stand_in, args), **kwargs)
        else:
            result = None
        return func(*args, **kwargs) if result is None else result

    def _embedding(
        self, input: Any, weight: Any, padding_idx: int | None = None, max_norm: float | None = None, *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        """Return the embedding of a table that is a layer's weight too; None for other tables."""
        apply_pending_updates(weight)
        if not self._weights.has_stand_in(weight) or max_norm is not None or kwargs.get("sparse") or True in args[2:]:
            return None
        if not _can_be_split(weight, weight, None):
            return None
        return functional.embedding(input, self._weights.stand_in(weight), padding_idx)

    def _stand_in(self, argument: Any) -> Any:
        """Return what stands for an argument that is a layer's weight or bias, and any other one as it is."""
        if type(argument) not in _PLAIN or not self._weights.has_stand_in(argument):
            return argument
        return self._weights.stand_in(argument) if _can_be_split(argument, argument, None) else argument

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
        apply_pending_updates(weight, bias)
        if not _can_be_split(input, weight, bias) or input.dim() < 2 or weight.dim() != 2 or weight.numel() == 0:
            return None
        weights = self._weights.of_call(weight, bias)
        return None if weights is None else split_linear(self._in_precision(input), weights)

    def _convolution(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        bind = _bind_transposed if func in _TRANSPOSED else _bind
        input, weight, bias, geometry = bind(_DIMENSIONS[func], *args, **kwargs)
        apply_pending_updates(weight, bias)
        if geometry is None or not _can_be_split(input, weight, bias) or input.dim() != weight.dim():
            return None
        weights = self._weights.of_call(weight, bias)
        return None if weights is None else split_convolution(self._in_precision(input), weights, geometry, weight)

    def _in_precision(self, input: torch.Tensor) -> torch.Tensor:
        """Return an input in the precision in which autocast has it used."""
        dtype = autocast_dtype(input)
        if dtype is input.dtype or not is_cast_once(input):
            return input.to(dtype)
        # A leaf, such as a learned query, is cast once for all calls: autograd sums up its gradients in low precision.
        notes = self._weights.autocast_notes.of_context(input.device)
        key = "input", id(input)
        if key not in notes:
            notes[key] = input, input.to(dtype)  # with the input itself, so that no other tensor gets its id
        low_precision: torch.Tensor = notes[key][1]
        return low_precision


_Bound = tuple[Any, Any, Any, Geometry | None]


def _bind(
    dimensions: int, input: Any, weight: Any, bias: Any = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> _Bound:  # fmt: skip
    """Return the arguments of a convolution; no geometry for padding that is not the same on both sides."""
    if isinstance(padding, str):
        padding = 0 if padding == "valid" else None
    if padding is None:
        return input, weight, bias, None
    places = [_each(value, dimensions) for value in (stride, padding, dilation)]
    return input, weight, bias, Geometry(places[0], places[1], places[2], False, (0,) * dimensions, groups)


def _bind_transposed(
    dimensions: int, input: Any, weight: Any, bias: Any = None,
    stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> _Bound:  # fmt: skip
    """Return the arguments of a transposed convolution."""
    places = [_each(value, dimensions) for value in (stride, padding, dilation, output_padding)]
    return input, weight, bias, Geometry(places[0], places[1], places[2], True, places[3], groups)


def _each(value: Any, dimensions: int) -> tuple[int, ...]:
    """Return a number for each dimension, from one for all or from one for each."""
    values: Sequence[int] = (value,) if isinstance(value, int) else tuple(value)
    return tuple(values) * dimensions if len(values) == 1 else tuple(values)


def _can_be_taken_apart(func: Any, *arguments: Any) -> bool:
    """Return whether a function that makes several calls may be replaced by these calls.

    Not where something else observes the function as one: another torch-function mode, a tensor subclass, a trace.
    """
    apply_pending_updates(*arguments)
    if not torch.is_grad_enabled() or is_being_traced() or other_function_modes() or not isinstance(func, FunctionType):
        return False
    return all(type(one) in _PLAIN for one in arguments if isinstance(one, torch.Tensor))


def _can_be_split(input: Any, weight: Any, bias: Any) -> bool:
    """Return whether a call with these tensors can leave its weight gradient as a task."""
    tensors = [input, weight] if bias is None else [input, weight, bias]
    if not all(type(tensor) in _PLAIN for tensor in tensors):
        return False
    if any(t.layout is not torch.strided or t.device != weight.device for t in tensors):
        return False
    if not torch.is_grad_enabled() or is_being_traced():
        return False
    if in_function_transform() or in_forward_mode() or saved_tensors_are_hooked():
        return False
    if bias is not None and bias.dim() != 1:
        return False
    if bias is not None and weight.is_leaf is not bias.is_leaf and autocast_dtype(weight) is not weight.dtype:
        # As in an attention with separate projection weights, each of whose calls uses a part of one bias: autocast
        # casts the leaf once for all calls, but the part in each, and a node of autograd for both casts them alike.
        return False
    dtypes = {autocast_dtype(tensor) for tensor in tensors}
    return weight.requires_grad and len(dtypes) == 1 and weight.is_floating_point()
