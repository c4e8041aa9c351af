"""Parameters with an update that is still to come."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradweave._compat.eager import alias_of, no_torch_function, use_count
from gradweave._runtime.deferred.arguments import METADATA, of_type

_RESOLVE = "_gradweave_resolve"
_SHOWN = "_gradweave_gradient"
_MAKE_PARAMETER = nn.Parameter.__new__.__code__


class PendingParameter(nn.Parameter):
    """A parameter that is updated before it is used.

    A parameter takes on this class by :func:`make_pending` and gives it up by :func:`restore`. The
    class of the object is swapped: the model, the optimizer and the loop hold references to the
    parameter, so another object would not be seen by them.

    ``.grad`` is an ordinary attribute meanwhile, so that zero_grad, which asks for all of them in
    every step, costs little: what :func:`make_pending` was given, until it is cleared. The gradient in
    the tensor itself, which autograd reads and writes in C++ and which would be added to, is kept empty.

    Code that reads memory without calling a torch function from Python (compiled and scripted models,
    C++ extensions, tensors that share the memory) does not come by here. Parameters that such code may
    read must not be made pending.
    """

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
            _resolve(self)
            if type(self) is nn.Parameter:
                self.grad = value
            else:  # by the update itself, which is under way
                show(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _use_count(self) -> int:
        # torch.utils.swap_tensors asks this, and then exchanges classes and memory without another torch function.
        _resolve(self)
        return use_count(self)

    def detach(self) -> Any:
        _resolve(self)
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
        for param in of_type((args, kwargs), PendingParameter):
            _resolve(param)
        return func(*args, **kwargs)

    # While an update runs, its parameters are still pending for other threads. To the update they are what they are:
    # it runs without __torch_function__. Copies that it makes are of plain parameters.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _resolve(self)
        with no_torch_function():
            return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _resolve(self)
        if type(self) is nn.Parameter:
            return self.__reduce_ex__(protocol)
        with no_torch_function():
            return nn.Parameter(alias_of(self), self.requires_grad).__reduce_ex__(protocol)


def _resolve(param: nn.Parameter) -> None:
    resolve: Callable[[nn.Parameter], None] | None = param.__dict__.get(_RESOLVE)
    if resolve is not None:  # or another thread has restored the parameter since its class was looked at
        resolve(param)


_GRAD: Any = torch.Tensor.grad


def accumulated(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that a backward has left in a parameter, pending or not."""
    with no_torch_function():
        found: torch.Tensor | None = _GRAD.__get__(param)
    return found


def accumulate(param: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Leave a gradient in a parameter as a backward does, pending or not."""
    with no_torch_function():
        _GRAD.__set__(param, gradient)


def make_pending(param: nn.Parameter, resolve: Callable[[nn.Parameter], None], shown: torch.Tensor | None) -> None:
    """Make a parameter pending.

    Args:
        param: The parameter, of class ``nn.Parameter``, or already pending.
        resolve: Called with the parameter before it is used; must update it and call :func:`restore`,
            unless the update is under way.
        shown: What ``.grad`` is meanwhile. What a backward accumulates is kept apart from it.
    """
    accumulate(param, None)
    param.__dict__[_RESOLVE] = resolve
    param.__dict__[_SHOWN] = shown
    param.__class__ = PendingParameter


def shown_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that a pending parameter shows; None if it has been cleared."""
    shown: torch.Tensor | None = param.__dict__.get(_SHOWN)
    return shown


def show(param: nn.Parameter, shown: torch.Tensor | None) -> None:
    """Let a pending parameter show another gradient."""
    param.__dict__[_SHOWN] = shown


def restore(param: nn.Parameter) -> None:
    """Make a pending parameter an ordinary one, with the gradient that it shows.

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
    param.__dict__.pop(_RESOLVE, None)
