"""Every private torch name that gradweave uses, and nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

disabled_torch_function = torch._C._disabled_torch_function_impl
"""As ``__torch_function__`` of a subclass: functions see it as a plain tensor."""

map_nested = tree_map
"""Applies a function to every leaf of nested containers."""

no_torch_function = torch._C.DisableTorchFunctionSubclass
"""Context in which subclasses' ``__torch_function__`` is not consulted."""


def own_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The update of an optimizer's class, without the step hooks that torch wraps around it."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def step_pre_hooks(optimizer: Optimizer) -> dict[int, Any]:
    """The hooks that run before a step, in their order."""
    return optimizer._optimizer_step_pre_hooks


def put_first_behind_step(optimizer: Optimizer, hook: int) -> None:
    """Makes one of the hooks that run behind a step the first of them."""
    hooks: dict[int, Any] = optimizer._optimizer_step_post_hooks
    others = [(number, callback) for number, callback in hooks.items() if number != hook]
    for number, _ in others:
        del hooks[number]
    hooks.update(others)


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Context in which an optimizer's hooks do not run, also where its step calls its parent's."""
    before, behind = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, behind


def load_hooks(module: torch.nn.Module) -> list[Any]:
    """The hooks that run after a module has loaded a state dict."""
    return list(module._load_state_dict_post_hooks.values())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls back when the backward that is now running is through; not if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def current_backward() -> int:
    """A number for the backward that is now running; one inside another has its own."""
    return torch._C._current_graph_task_id()


def metadata_guard(cls: type[torch.Tensor], like: torch.Tensor) -> Any:
    """A tensor of a subclass that looks like another one and has no data."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=False
    )


def in_function_transform() -> bool:
    """Whether ``torch.func`` is transforming the code that runs now (grad, vjp, jvp, vmap, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_function_transforms() -> AbstractContextManager[Any]:
    """Context in which ``torch.func`` leaves the code alone that it is transforming."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def is_distributed_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one rank's part of a larger one, as under FSDP2."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module runs outside the reach of ``__torch_function__``: compiled or scripted."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, (OptimizedModule, torch.jit.ScriptModule)) or (
        getattr(module, "_compiled_call_impl", None) is not None
    )
