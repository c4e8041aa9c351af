"""Parameters whose update is pending."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradweave._compat.functions import no_torch_function
from gradweave._compat.tensors import alias_of, use_count
from gradweave._runtime.deferred.arguments import METADATA, of_type

_RESOLVE = "_gradweave_resolve"
_SHOWN = "_gradweave_gradient"
_MAKE_PARAMETER = nn.Parameter.__new__.__code__


class PendingParameter(nn.Parameter):
    """A parameter that is updated before it is used.

    :func:`make_pending` gives a parameter this class, and :func:`restore` takes it away. The class of the object is
    swapped, since the model, the optimizer and the loop refer to the object.

    Meanwhile ``.grad`` is an ordinary attribute, which makes ``zero_grad()`` cheap: the gradient that
    :func:`make_pending` was given, until it is cleared. The tensor's own gradient, which autograd reads and writes in
    C++, is empty, so that a backward does not add to a gradient that the update is still to read.

    Code that reads memory without calling a torch function from Python (compiled and scripted models, C++ extensions,
    tensors that share the memory) is not noticed here. Parameters that such code may read must not be made pending.
    """

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        # Libraries make a parameter like p by type(p)(data): the result must be a plain one.
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
            else:  # the update itself, which is running, assigns the gradient
                show(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _use_count(self) -> int:
        # torch.utils.swap_tensors calls this first, and then swaps classes and memory without a torch function.
        resolve(self)
        return use_count(self)

    def detach(self) -> Any:
        resolve(self)
        plain = alias_of(self)
        # nn.Parameter(p) calls this, and requires the result to be of the class that p now has.
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
        for param in of_type((args, kwargs), PendingParameter):
            resolve(param)
        return func(*args, **kwargs)

    # While an update runs, its parameters are still pending, for other threads; the update itself uses them without
    # __torch_function__. The copies and pickles that it makes must be of plain parameters.

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


def resolve(param: nn.Parameter) -> None:
    """Apply a parameter's pending update, if it has one."""
    owner: Callable[[nn.Parameter], None] | None = param.__dict__.get(_RESOLVE)
    if owner is not None:  # None if another thread has restored the parameter since its class was read
        owner(param)


_GRAD: Any = torch.Tensor.grad


def accumulated(param: nn.Parameter) -> torch.Tensor | None:
    """Return the tensor's own gradient, which a backward accumulates, of a parameter that may be pending."""
    with no_torch_function():
        found: torch.Tensor | None = _GRAD.__get__(param)
    return found


def accumulate(param: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Set the tensor's own gradient, as a backward does, of a parameter that may be pending."""
    with no_torch_function():
        _GRAD.__set__(param, gradient)


def make_pending(param: nn.Parameter, resolve: Callable[[nn.Parameter], None], shown: torch.Tensor | None) -> None:
    """Make a parameter pending.

    Args:
        param: The parameter, of class ``nn.Parameter`` or already pending.
        resolve: Called with the parameter before it is used; must update it and call :func:`restore`,
            unless the update is running.
        shown: The value of ``.grad`` meanwhile. Gradients that a backward accumulates are kept apart from it.
    """
    accumulate(param, None)
    param.__dict__[_RESOLVE] = resolve
    param.__dict__[_SHOWN] = shown
    param.__class__ = PendingParameter


def shown_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Return ``.grad`` of a pending parameter; None if it has been cleared."""
    shown: torch.Tensor | None = param.__dict__.get(_SHOWN)
    return shown


def show(param: nn.Parameter, shown: torch.Tensor | None) -> None:
    """Set ``.grad`` of a pending parameter."""
    param.__dict__[_SHOWN] = shown


def restore(param: nn.Parameter) -> None:
    """Make a pending parameter a plain one with the gradient that it shows.

    Gradients that a backward has accumulated meanwhile are added, as they would have been in stock order.
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
    param.__dict__.pop(_RESOLVE, None)
