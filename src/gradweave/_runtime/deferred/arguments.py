"""Stand-ins among the arguments of torch functions, and the functions that stand-ins answer themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_ATTRIBUTES = (
    "requires_grad", "is_leaf", "grad_fn", "dtype", "device", "layout", "is_cuda", "is_sparse", "_version",
    "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
_SETTABLE = ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
# A property of torch.Tensor that is written in C reaches __torch_function__ as its descriptor's __get__ or __set__.
METADATA: set[Any] = {
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(torch.Tensor, name).__set__ for name in _SETTABLE),
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.requires_grad_,
}
"""Functions that a stand-in answers without being resolved.

The shape is not among them: vmap, for example, asks for the shape, and then reads the value without another call of
``__torch_function__``.
"""


def of_type(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield the objects of exactly one type among nested arguments.

    Each object's type is read when it is reached, since resolving one object may resolve others.
    """
    if type(value) is kind:
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from of_type(item, kind)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from of_type(item, kind)
