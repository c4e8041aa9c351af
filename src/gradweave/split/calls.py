"""Finding the linear and convolution calls of a forward, whoever makes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gradweave.compat.eager import (
    in_forward_mode,
    in_function_transform,
    is_being_traced,
    no_torch_function,
    other_function_modes,
    part_by_part,
    saved_tensors_are_hooked,
)
from gradweave.split.layers import Geometry, split_convolution, split_linear
from gradweave.split.queue import WeightGradientQueue
from gradweave.split.taps import Tap

_DIMENSIONS = {
    functional.conv1d: 1, functional.conv2d: 2, functional.conv3d: 3,
    functional.conv_transpose1d: 1, functional.conv_transpose2d: 2, functional.conv_transpose3d: 3,
}  # fmt: skip
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ATTENTION = functional.multi_head_attention_forward
_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The precision in which autocast, if it is on, has a tensor used in these calls."""
    device = tensor.device.type
    if tensor.is_floating_point() and tensor.dtype is not torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


class SplitCalls(TorchFunctionMode):
    """Context in which linear and convolution calls leave their weight gradients in a queue.

    What it does not know runs stock: weights that need no gradient, autograd switched off, function
    transforms, inputs of other kinds than dense tensors, and what is checkpointed: it runs again in
    backward, outside of this context, and must save the same tensors there.

    Args:
        queue: Where they are left.
        first: Weights and biases whose gradients are to come behind all input gradients, by the number of
            their layer; those of other weights come where they always did.
        in_order: Of these layers those whose gradients come where they always did after all.

    Attributes:
        closed: Whether everything runs stock from now on.
    """

    def __init__(
        self,
        queue: WeightGradientQueue,
        first: Mapping[int, tuple[torch.Tensor, torch.Tensor | None]] | None = None,
        in_order: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.closed = False
        self._queue = queue
        self._taps: dict[tuple[int, int], tuple[Tap, torch.Tensor, torch.Tensor | None]] = {}
        self._layers: dict[int, int] = {}
        self._inputs: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._next = max(first, default=-1) + 1 if first else 0
        needs_taps = torch.is_grad_enabled() and not is_being_traced()
        with no_torch_function():  # what has an update pending is brought up to date where it is used, not here
            for number, (weight, bias) in (first or {}).items():
                self._layers.setdefault(id(weight), number)
                if needs_taps and weight.requires_grad and number not in in_order:
                    self._tap(weight, bias)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As torch calls it for every function of its own."""
        kwargs = kwargs or {}
        if self.closed:
            made = None
        elif func is functional.linear:
            made = self._linear(*args, **kwargs)
        elif func in _DIMENSIONS:
            made = self._convolution(func, *args, **kwargs)
        elif func is _ATTENTION and _can_be_taken_apart(func, *args, *kwargs.values()):
            with self:  # its projections come here as calls of linear
                made = part_by_part(func)(*args, **kwargs)
        else:
            made = None
        return func(*args, **kwargs) if made is None else made

    def _tap(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Tap:
        key = id(weight), id(bias)
        if key not in self._taps or not self._taps[key][0].stands_for(weight):
            if id(weight) not in self._layers:
                self._layers[id(weight)] = self._next
                self._next += 1
            self._taps[key] = Tap(self._layers[id(weight)], weight, bias, self._queue), weight, bias
        return self._taps[key][0]

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
        bring_up_to_date(weight, bias)
        if not _can_be_split(input, weight, bias) or input.dim() < 2 or weight.dim() != 2 or weight.numel() == 0:
            return None
        return split_linear(self._in_precision(input), self._tap(weight, bias))

    def _convolution(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        bind = _bind_transposed if func in _TRANSPOSED else _bind
        input, weight, bias, geometry = bind(_DIMENSIONS[func], *args, **kwargs)
        bring_up_to_date(weight, bias)
        if geometry is None or not _can_be_split(input, weight, bias) or input.dim() != weight.dim():
            return None
        return split_convolution(self._in_precision(input), self._tap(weight, bias), geometry)

    def _in_precision(self, input: torch.Tensor) -> torch.Tensor:
        """An input as autocast has it used; a leaf is cast once for all calls, so that their gradients add up alike."""
        dtype = _autocast_dtype(input)
        if dtype is input.dtype or not (input.is_leaf and input.requires_grad and torch.is_autocast_cache_enabled()):
            return input.to(dtype)
        known, cast = self._inputs.get(id(input), (None, input))
        if known is not input:
            cast = input.to(dtype)
            self._inputs[id(input)] = input, cast
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


def bring_up_to_date(*params: Any) -> None:
    """Has a parameter of another class, as one whose update is pending, do what it does when it is used."""
    for param in params:
        if isinstance(param, torch.nn.Parameter) and type(param) is not torch.nn.Parameter:
            param.size()


def _can_be_taken_apart(func: Any, *given: Any) -> bool:
    """Whether nobody but us has a say in how a function of several calls runs."""
    bring_up_to_date(*given)
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
    if bias is not None and weight.is_leaf and not bias.is_leaf and _autocast_dtype(weight) is not weight.dtype:
        return False  # as of an attention's weight, with another part of its bias in each call: autocast casts it once
    dtypes = {_autocast_dtype(tensor) for tensor in tensors}
    return weight.requires_grad and len(dtypes) == 1 and weight.is_floating_point()
