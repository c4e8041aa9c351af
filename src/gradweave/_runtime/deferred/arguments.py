"""Arguments of torch functions: which of them are stand-ins, and what may be asked of a stand-in as it is."""

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
# Properties of torch.Tensor that are written in C reach __torch_function__ as the ``__get__`` or ``__set__`` of their
# descriptor.
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

The shape is not among them: functions that go on to read the value without another call of
``__torch_function__``, such as vmap, ask for the shape first.
"""


def of_type(value: Any, kind: type[T]) -> Iterator[T]:
    """Yield the objects of exactly one type among nested arguments.

    The type is looked at as each object is reached: one that has been resolved meanwhile is left out.
    """
    if type(value) is kind:
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from of_type(item, kind)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from of_type(item, kind)
