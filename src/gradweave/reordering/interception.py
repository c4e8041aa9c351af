"""Finding the linear and convolution calls of a forward, whoever makes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from gradweave.reordering.autocast_cache import is_cast_once
from gradweave.reordering.gradient_node import Tap
from gradweave.reordering.queue import WeightGradientQueue
from gradweave.reordering.shared_nodes import Call, SharedTaps
from gradweave.reordering.split_ops import Geometry, split_convolution, split_linear

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


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The precision in which autocast, if it is on, has a tensor used in these calls."""
    device = tensor.device.type
    if tensor.is_floating_point() and tensor.dtype is not torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


class SplitCalls(WeightGradientSplitter):
    """Context in which linear and convolution calls leave their weight gradients in a queue.

    What it does not know runs stock: weights that need no gradient, autograd switched off, function
    transforms, inputs of other kinds than dense tensors, and what is checkpointed: it runs again in
    backward, outside of this context, and must save the same tensors there.

    Args:
        queue: Where they are left.
        first: Weights and biases whose gradients are to come behind all input gradients, by the number of
            their layer; those of other weights come where they always did.
        in_order: Of these layers those whose gradients come where they always did after all.
        taps: Of the model, for all of its forwards; without them, those of this one are its own.

    Attributes:
        closed: Whether everything runs stock from now on.
    """

    def __init__(
        self,
        queue: WeightGradientQueue,
        first: Mapping[int, tuple[torch.Tensor, torch.Tensor | None]] | None = None,
        in_order: Collection[int] = (),
        taps: SharedTaps | None = None,
    ) -> None:
        super().__init__()
        self.closed = False
        self._queue = queue
        self._layers: dict[int, int] = {}
        self._next = max(first, default=-1) + 1 if first else 0
        for number, (weight, _) in (first or {}).items():
            self._layers.setdefault(id(weight), number)
        taps = taps or SharedTaps(queue)
        self._casts = taps.casts
        own = {
            number: pair for number, pair in (first or {}).items() if number not in in_order and pair[0].requires_grad
        }
        # A function transform runs stock, and would want to transform the taps.
        may_tap = torch.is_grad_enabled() and not is_being_traced() and not in_function_transform()
        self._shared = taps.of(own) if may_tap else {}

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
        elif func in _PREPARED and any(id(one) in self._shared for one in args):
            return func(*map(self._whole, args), **kwargs)
        else:
            made = None
        return func(*args, **kwargs) if made is None else made

    def _tap(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Tap | Call:
        """What a weight and a bias go through: for all calls the same where they come last, else one for each.

        Where autocast casts a weight once for several calls, these have one as well.
        """
        shared = self._shared.get(id(weight))
        if shared is not None and shared.has(weight, bias) and (call := shared.call(weight, bias)) is not None:
            return call
        if id(weight) not in self._layers:
            self._layers[id(weight)] = self._next
            self._next += 1
        made = Tap(self._layers[id(weight)], weight, bias, self._queue)
        if _autocast_dtype(weight) is weight.dtype or not is_cast_once(weight):
            return made
        kept = self._casts.kept(weight.device)
        key = id(weight), id(bias)
        if key not in kept or not kept[key][0].stands_for(weight):
            kept[key] = made, weight, bias
        tap: Tap = kept[key][0]
        return tap

    def _embedding(
        self, input: Any, weight: Any, padding_idx: int | None = None, max_norm: float | None = None, *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        """Of a table that is a layer's weight too."""
        apply_pending_updates(weight)
        shared = self._shared.get(id(weight))
        if shared is None or not shared.has(weight) or max_norm is not None or kwargs.get("sparse") or True in args[2:]:
            return None
        if not _can_be_split(weight, weight, None):
            return None
        return functional.embedding(input, shared.whole(weight), padding_idx)

    def _whole(self, given: Any) -> Any:
        """What stands for a layer's weight or bias where another function than the layer's own uses it."""
        shared = self._shared.get(id(given)) if type(given) in _PLAIN else None
        if shared is None or not shared.has(given) or not _can_be_split(given, given, None):
            return given
        return shared.whole(given)

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
        apply_pending_updates(weight, bias)
        if not _can_be_split(input, weight, bias) or input.dim() < 2 or weight.dim() != 2 or weight.numel() == 0:
            return None
        return split_linear(self._in_precision(input), self._tap(weight, bias))

    def _convolution(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        bind = _bind_transposed if func in _TRANSPOSED else _bind
        input, weight, bias, geometry = bind(_DIMENSIONS[func], *args, **kwargs)
        apply_pending_updates(weight, bias)
        if geometry is None or not _can_be_split(input, weight, bias) or input.dim() != weight.dim():
            return None
        return split_convolution(self._in_precision(input), self._tap(weight, bias), geometry, weight)

    def _in_precision(self, input: torch.Tensor) -> torch.Tensor:
        """An input as autocast has it used; a leaf is cast once for all calls, so that their gradients add up alike."""
        dtype = _autocast_dtype(input)
        if dtype is input.dtype or not is_cast_once(input):
            return input.to(dtype)
        kept = self._casts.kept(input.device)
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
    if bias is not None and weight.is_leaf is not bias.is_leaf and _autocast_dtype(weight) is not weight.dtype:
        return False  # as of an attention's weight, with another part of its bias in each call: autocast casts one once
    dtypes = {_autocast_dtype(tensor) for tensor in tensors}
    return weight.requires_grad and len(dtypes) == 1 and weight.is_floating_point()
