"""Parameters whose update is still to come: whoever looks at one sees it updated."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gradweave._compat.eager import alias_of, no_torch_function, use_count
from gradweave.errors import GradweaveError

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
_SHOWN = "_gradient_shown"
_MAKE_PARAMETER = nn.Parameter.__new__.__code__


def pending_class(resolve: Callable[[nn.Parameter], None]) -> type[nn.Parameter]:
    """A class that parameters take on while their update is pending: see :func:`make_pending`.

    Any torch function given such a parameter, and any attribute that depends on its value, calls
    ``resolve`` first, which must update it and give it back its own class with :func:`restore`.
    ``.grad`` is an ordinary attribute meanwhile, so that zero_grad, which asks for all of them in
    every step, costs little: what :func:`make_pending` was given, until it is cleared.
    """

    class PendingParameter(nn.Parameter):
        def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
            # type(p)(data), by which libraries make another parameter like p
            return nn.Parameter(data, requires_grad)

        @property
        def grad(self) -> torch.Tensor | None:
            shown: torch.Tensor | None = self.__dict__.get(_SHOWN)
            return accumulated(self) if shown is None else shown

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            if value is None:
                show(self, None)
                accumulate(self, None)
            else:
                resolve(self)
                if type(self) is nn.Parameter:
                    self.grad = value
                else:  # by the update itself, which is under way
                    show(self, value)

        @grad.deleter
        def grad(self) -> None:
            self.grad = None

        def _use_count(self) -> int:
            # torch.utils.swap_tensors asks this, and then exchanges classes and memory without another word.
            resolve(self)
            return use_count(self)

        def detach(self) -> Any:
            resolve(self)
            plain = alias_of(self)
            # nn.Parameter(p) makes a parameter of this, and only if it is of the class that p has by now.
            if sys._getframe(1).f_code is _MAKE_PARAMETER:
                plain.__class__ = nn.Parameter
            return plain

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func in METADATA:
                with no_torch_function():
                    return func(*args, **kwargs)
            for param in _of_class((args, kwargs), cls):
                resolve(param)
            return func(*args, **kwargs)

        # While the update itself runs, a parameter is still pending for others, and for it what it is.

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            resolve(self)
            with no_torch_function():
                return nn.Parameter.__deepcopy__(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            resolve(self)
            if type(self) is nn.Parameter:
                return self.__reduce_ex__(protocol)
            with no_torch_function():
                return nn.Parameter(alias_of(self), self.requires_grad).__reduce_ex__(protocol)

    return PendingParameter


_GRAD: Any = torch.Tensor.grad


def accumulated(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient that a backward has left in a parameter, whatever its class says."""
    with no_torch_function():
        found: torch.Tensor | None = _GRAD.__get__(param)
    return found


def accumulate(param: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Leaves a gradient in a parameter as a backward does, whatever its class says."""
    with no_torch_function():
        _GRAD.__set__(param, gradient)


def make_pending(param: nn.Parameter, cls: type[nn.Parameter], shown: torch.Tensor | None) -> None:
    """Gives a parameter a class of :func:`pending_class`, and a gradient to show meanwhile.

    What a backward accumulates while the update is pending is kept apart.
    """
    accumulate(param, None)
    show(param, shown)
    param.__class__ = cls


def shown_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient that a pending parameter shows; None if it has been cleared."""
    shown: torch.Tensor | None = param.__dict__.get(_SHOWN)
    return shown


def show(param: nn.Parameter, shown: torch.Tensor | None) -> None:
    """Lets a pending parameter show another gradient."""
    param.__dict__[_SHOWN] = shown


def restore(param: nn.Parameter) -> None:
    """Gives a parameter its own class back, and the gradient that it shows.

    What a backward has accumulated meanwhile is added, as it would have been.
    """
    shown = shown_gradient(param)
    if shown is not None:
        since = accumulated(param)
        if since is not None:
            with torch.no_grad():
                shown.add_(since)
        accumulate(param, shown)
    param.__class__ = nn.Parameter
    param.__dict__.pop(_SHOWN, None)


def is_pending_gradient(value: Any) -> bool:
    """Whether a gradient is of a class of :func:`pending_gradient_class` now."""
    return getattr(type(value), "_is_pending", False)


def pending_gradient_class(resolve: Callable[[torch.Tensor], None]) -> type[torch.Tensor]:
    """A class that gradients take on while they are on their way, or while an update with them is pending.

    Any torch function given such a gradient calls ``resolve`` first, which must give it back its own class.
    """

    class PendingGradient(torch.Tensor):
        _is_pending = True

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func in METADATA:
                with no_torch_function():
                    return func(*args, **kwargs)
            for gradient in _of_class((args, kwargs), cls):
                resolve(gradient)
                if type(gradient) is cls:
                    raise GradweaveError("a gradient was kept whose update was given up; it is not what it should be")
            return func(*args, **kwargs)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            resolve(self)
            return self.__deepcopy__(memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            resolve(self)
            return self.__reduce_ex__(protocol)

    return PendingGradient


def _of_class(value: Any, cls: type) -> Iterator[Any]:
    """The objects of a class among nested arguments."""
    if type(value) is cls:
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _of_class(item, cls)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _of_class(item, cls)


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
    "items", "keys", "values", "pop", "popitem", "clear", "setdefault", "update", "copy", "__ne__", "__reversed__",
    "__or__", "__ror__", "__ior__", "__copy__", "__missing__", "__sizeof__",
):  # fmt: skip
    setattr(PendingState, _name, _forward_to_settled(_name))
