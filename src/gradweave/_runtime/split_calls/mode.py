"""Interception of the linear and convolution calls of a forward, wherever they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

from gradweave._compat.eager import (
    in_forward_mode,
    in_function_transform,
    is_being_traced,
    other_function_modes,
    part_by_part,
    saved_tensors_are_hooked,
)
from gradweave._runtime.interception import WeightGradientSplitter, apply_pending_updates
from gradweave._runtime.split_calls.autocast_cache import autocast_dtype, is_cast_once
from gradweave._runtime.split_calls.operations import Geometry, split_convolution, split_linear
from gradweave._runtime.split_calls.taps import Taps

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
"""What a model may do with a weight before it uses it otherwise than the layer does; autocast leaves these alone."""


class CallSplitter(WeightGradientSplitter):
    """Context in which linear and convolution calls leave their weight gradients with the taps of their weights.

    What it does not know runs stock: weights that need no gradient, autograd switched off, function transforms, inputs
    of other kinds than dense tensors, and what is checkpointed: it runs again in backward, outside of this context, and
    must save the same tensors there.

    Args:
        taps: Of the forward that runs in this context.

    Attributes:
        closed: Whether everything runs stock from now on.
    """

    def __init__(self, taps: Taps) -> None:
        super().__init__()
        self.closed = False
        self._taps = taps

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As torch calls it for every function of its own."""
        kwargs = kwargs or {}
        if self.closed or torch.compiler.is_compiling():
            made = None
        elif func is functional.linear:
            made = self._linear(*args, **kwargs)
        elif func in _DIMENSIONS:
            made = self._convolution(func, *args, **kwargs)
        elif func is _ATTENTION and _can_be_taken_apart(func, *args, *kwargs.values()):
            with self:  # its projections come here as calls of linear
                made = part_by_part(func)(*args, **kwargs)
        elif func is functional.embedding:
            made = self._embedding(*args, **kwargs)
        elif func in _PREPARED and any(map(self._taps.has, args)):
            return func(*map(self._whole, args), **kwargs)
        else:
            made = None
        return func(*args, **kwargs) if made is None else made

    def _embedding(
        self, input: Any, weight: Any, padding_idx: int | None = None, max_norm: float | None = None, *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        """Of a table that is a layer's weight too."""
        apply_pending_updates(weight)
        if not self._taps.has(weight) or max_norm is not None or kwargs.get("sparse") or True in args[2:]:
            return None
        if not _can_be_split(weight, weight, None):
            return None
        return functional.embedding(input, self._taps.whole(weight), padding_idx)

    def _whole(self, given: Any) -> Any:
        """What stands for a layer's weight or bias where another function than the layer's own uses it."""
        if type(given) not in _PLAIN or not self._taps.has(given) or not _can_be_split(given, given, None):
            return given
        return self._taps.whole(given)

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
        apply_pending_updates(weight, bias)
        if not _can_be_split(input, weight, bias) or input.dim() < 2 or weight.dim() != 2 or weight.numel() == 0:
            return None
        tap = self._taps.tap(weight, bias)
        return None if tap is None else split_linear(self._in_precision(input), tap)

    def _convolution(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        bind = _bind_transposed if func in _TRANSPOSED else _bind
        input, weight, bias, geometry = bind(_DIMENSIONS[func], *args, **kwargs)
        apply_pending_updates(weight, bias)
        if geometry is None or not _can_be_split(input, weight, bias) or input.dim() != weight.dim():
            return None
        tap = self._taps.tap(weight, bias)
        return None if tap is None else split_convolution(self._in_precision(input), tap, geometry, weight)

    def _in_precision(self, input: torch.Tensor) -> torch.Tensor:
        """An input as autocast has it used; a leaf is cast once for all calls, so that their gradients add up alike."""
        dtype = autocast_dtype(input)
        if dtype is input.dtype or not is_cast_once(input):
            return input.to(dtype)
        kept = self._taps.casts.kept(input.device)
        key = "input", id(input)
        if key not in kept:
            kept[key] = input, input.to(dtype)
        cast: torch.Tensor = kept[key][1]
        return cast


_Bound = tuple[Any, Any, Any, Geometry | None]


def _bind(
    dimensions: int, input: Any, weight: Any, bias: Any = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> _Bound:  # fmt: skip
    """The arguments of a convolution; no geometry for padding that is not the same on both sides."""
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
    """The arguments of a transposed convolution."""
    places = [_each(value, dimensions) for value in (stride, padding, dilation, output_padding)]
    return input, weight, bias, Geometry(places[0], places[1], places[2], True, places[3], groups)


def _each(value: Any, dimensions: int) -> tuple[int, ...]:
    """A number for each dimension; one counts for all."""
    values: Sequence[int] = (value,) if isinstance(value, int) else tuple(value)
    return tuple(values) * dimensions if len(values) == 1 else tuple(values)


def _can_be_taken_apart(func: Any, *given: Any) -> bool:
    """Whether nobody but us has a say in how a function of several calls runs."""
    apply_pending_updates(*given)
    if not torch.is_grad_enabled() or is_being_traced() or other_function_modes() or not isinstance(func, FunctionType):
        return False
    return all(type(one) in _PLAIN for one in given if isinstance(one, torch.Tensor))


def _can_be_split(input: Any, weight: Any, bias: Any) -> bool:
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
        return False  # as of an attention's weight, with another part of its bias in each call: autocast casts one once
    dtypes = {autocast_dtype(tensor) for tensor in tensors}
    return weight.requires_grad and len(dtypes) == 1 and weight.is_floating_point()
