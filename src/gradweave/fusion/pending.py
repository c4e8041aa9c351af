"""Parameters whose update is still to come: whoever looks at one sees it updated."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gradweave.compat.eager import no_torch_function
from gradweave.fusion.guard import GradientGuard

_ATTRIBUTES = (
    "requires_grad", "is_leaf", "grad_fn", "dtype", "device", "layout", "is_cuda", "is_sparse", "_version",
    "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
_SETTABLE = ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
METADATA: set[Any] = {
    *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(torch.Tensor, name).__set__ for name in _SETTABLE),
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.requires_grad_,
}
"""What may be asked of a parameter without bringing it up to date.

Its shape is not among them: functions that go on to read the value without another word to
Python, such as vmap, ask for it first.
"""
_UNTOUCHED = object()


def pending_class(guard: GradientGuard, resolve: Callable[[nn.Parameter], None]) -> type[nn.Parameter]:
    """A class that parameters take on while their update is pending.

    Any torch function given such a parameter, and any attribute that depends on its value, calls
    ``resolve`` first, which must update it and give it back its own class with :func:`restore`.
    ``.grad`` is an ordinary attribute meanwhile, so that zero_grad, which asks for all of them in
    every step, costs nothing: the guard, or what has been assigned since.
    """

    class PendingParameter(nn.Parameter):
        grad = guard

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func in METADATA:
                with no_torch_function():
                    return func(*args, **kwargs)
            for param in _pending((args, kwargs), cls):
                resolve(param)
            return func(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            resolve(self)
            return self.__deepcopy__(memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            resolve(self)
            return self.__reduce_ex__(protocol)

    return PendingParameter


def restore(params: Iterable[nn.Parameter], guards: Mapping[int, GradientGuard]) -> None:
    """Gives parameters their own class back; ``.grad`` is what was assigned meanwhile, or their guard.

    Args:
        params: Pending parameters.
        guards: By ``id`` of the parameter.
    """
    for param in params:
        param.__class__ = nn.Parameter
        assigned = param.__dict__.pop("grad", _UNTOUCHED)
        if assigned is _UNTOUCHED:
            param.grad = guards[id(param)]
        elif assigned is not None:
            param.grad = assigned


def _pending(value: Any, cls: type) -> Iterator[Any]:
    """The pending parameters among nested arguments."""
    if type(value) is cls:
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _pending(item, cls)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _pending(item, cls)


class PendingState(defaultdict[Any, Any]):
    """What ``optimizer.state`` is while updates are pending: whoever looks at it sees them done.

    Args:
        settle: Applies what is pending and returns the optimizer's own state.
    """

    def __init__(self, settle: Callable[[], Any]) -> None:
        super().__init__(dict)
        self._settle = settle

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._settle(), memo)

    def __reduce__(self) -> Any:
        return self._settle().__reduce__()


def _forward_to_settled(name: str) -> Callable[..., Any]:
    def method(self: PendingState, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._settle(), name)(*args, **kwargs)

    return method


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__", "__eq__", "__repr__", "get",
    "items", "keys", "values", "pop", "popitem", "clear", "setdefault", "update", "copy",
):  # fmt: skip
    setattr(PendingState, _name, _forward_to_settled(_name))
