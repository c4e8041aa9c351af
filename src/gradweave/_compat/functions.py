"""Private names of torch around its functions: modes, transforms and tracers that see them run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

disabled_torch_function = torch._C._disabled_torch_function_impl
"""As ``__torch_function__`` of a subclass: functions see it as a plain tensor."""


map_nested = tree_map
"""Apply a function to every leaf of nested containers."""


DispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""A context that sees, or changes, the operations that run."""


no_torch_function = torch._C.DisableTorchFunctionSubclass
"""Context in which subclasses' ``__torch_function__`` is not consulted."""


def other_function_modes() -> int:
    """Return the number of modes, besides the one that is being asked, that see torch's functions."""
    return int(torch._C._len_torch_function_stack())


def without_function_mode(kind: type[TorchFunctionMode]) -> AbstractContextManager[Any]:
    """Return a context in which the innermost mode is left, if it is of the given class; all others stay."""
    innermost = torch.overrides._get_current_function_mode()
    return torch.overrides._pop_mode_temporarily() if isinstance(innermost, kind) else nullcontext()


def function_modes() -> list[TorchFunctionMode]:
    """Return the modes, besides the one that is being asked, that see torch's functions, the innermost last."""
    modes: list[TorchFunctionMode] = torch.overrides._get_current_function_mode_stack()
    return modes


def is_device_mode(mode: TorchFunctionMode) -> bool:
    """Return whether a mode only says where new tensors are made, as that of ``torch.set_default_device`` does."""
    return isinstance(mode, torch.utils._device.DeviceContext)


def enter_function_mode(mode: TorchFunctionMode) -> None:
    """Enter a mode that other code leaves."""
    torch.overrides._push_mode(mode)


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Leave an active mode, even if others were entered inside it; these stay."""
    inside = []
    while (innermost := torch.overrides._pop_mode()) is not mode:
        inside.append(innermost)
    for other in reversed(inside):
        torch.overrides._push_mode(other)


def part_by_part(function: Any, *, traceable: bool = False, **others: Any) -> Callable[..., Any]:
    """Return a copy of a functional without its own ``__torch_function__`` check, so that those it calls are checked.

    Its own first lines would hand it to a mode as a whole, which is left for as long as it runs. Other names are what
    they are now: make another one for each call.

    Args:
        function: The function.
        traceable: For Dynamo, which looks names up in the module that a function says it is of, unless it says none.
        others: What it finds under names of its module in their place.
    """
    names = {**function.__globals__, "has_torch_function": lambda _: False, **others}
    if traceable:
        del names["__name__"]
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def is_being_traced() -> bool:
    """Return whether Dynamo or the older tracer is making a graph of the code that now runs."""
    return torch.compiler.is_compiling() or bool(torch._C._is_tracing())


@contextmanager
def not_traced() -> Iterator[None]:
    """Return a context in which the older tracer does not see what runs."""
    state = torch._C._get_tracing_state()
    if state is None:
        yield
        return
    set_state: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
    set_state(None)
    try:
        yield
    finally:
        set_state(state)


def asked_by_script() -> bool:
    """Return whether torch.jit.script reads the caller's property."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.jit")


def in_forward_mode() -> bool:
    """Return whether forward-mode derivatives are being computed."""
    return torch.autograd.forward_ad._current_level >= 0


function_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""Return what ``torch.func`` does to the code that now runs (grad, vjp, jvp, vmap, ...); None if nothing."""


def in_function_transform() -> bool:
    """Return whether ``torch.func`` is transforming the code that now runs."""
    return function_transform() is not None


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of modes that see, or trace, the operations that now run."""


def outside_function_transforms() -> AbstractContextManager[Any]:
    """Return a context in which ``torch.func`` does not transform the code."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def without_new_function_modes(known: int) -> AbstractContextManager[Any]:
    """Return a context in which no mode sees torch's functions, if there are more of them than were known."""
    return torch._C.DisableTorchFunction() if other_function_modes() > known else nullcontext()


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which no mode sees, or traces, the operations that run."""
    if dispatch_modes() == 0:
        return nullcontext()
    return torch.utils._python_dispatch._disable_current_modes()


def flat_leaves(value: Any) -> list[Any]:
    """Return the leaves of nested containers, in order."""
    leaves: list[Any] = tree_leaves(value)
    return leaves
