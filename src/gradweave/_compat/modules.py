"""Private names of torch.nn: hooks of modules, and compiled ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

ConvolutionModule = torch.nn.modules.conv._ConvNd
"""The base class of all convolution modules."""


def hooks_of_all() -> bool:
    """Return whether hooks exist that run for every module, or before every optimizer's step."""
    module = torch.nn.modules.module
    return bool(
        module._global_forward_hooks
        or module._global_forward_pre_hooks
        or module._global_backward_hooks
        or module._global_backward_pre_hooks
        or _global_optimizer_pre_hooks
    )


CriterionModule = torch.nn.modules.loss._Loss
"""The base class of torch's losses."""


def load_hooks(module: torch.nn.Module) -> list[Any]:
    """Return the hooks that run after a module has loaded a state dict."""
    return list(module._load_state_dict_post_hooks.values())


def has_one_hook(module: torch.nn.Module) -> bool:
    """Return whether a module's forward has one hook after it, and none before it."""
    return len(module._forward_hooks) == 1 and not module._forward_pre_hooks


def forward_pre_hooks(module: torch.nn.Module) -> list[Any]:
    """Return the hooks that run before a module's forward."""
    return list(module._forward_pre_hooks.values())


def is_parametrized(module: torch.nn.Module) -> bool:
    """Return whether reading a module's weight computes it."""
    return torch.nn.utils.parametrize.is_parametrized(module)


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module runs outside the reach of ``__torch_function__``: compiled or scripted."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, (OptimizedModule, torch.jit.ScriptModule)) or (
        getattr(module, "_compiled_call_impl", None) is not None
    )


def is_compiled_outside(module: torch.nn.Module) -> bool:
    """Return whether a module is what ``torch.compile(module)`` returns, whose hooks run outside compiled code."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule)


def inside_of_compiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model that ``torch.compile(model)`` was given, from what it returned; any other model as it is."""
    return module._orig_mod if is_compiled_outside(module) else module  # type: ignore[return-value]


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Return whether hooks run when backward enters a module, or leaves it."""
    return bool(module._backward_hooks) or bool(module._backward_pre_hooks)


_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def hooks_suspended(module: torch.nn.Module) -> Iterator[None]:
    """Return a context in which a module and its parts have no hooks but torch's own that compute weights."""
    suspended = [(part, name, vars(part)[name]) for part in module.modules() for name in _MODULE_HOOKS]
    for part, name, hooks in suspended:
        vars(part)[name] = OrderedDict((key, hook) for key, hook in hooks.items() if _computes_a_weight(hook))
    try:
        yield
    finally:
        for part, name, hooks in suspended:
            vars(part)[name] = hooks


def _computes_a_weight(hook: Any) -> bool:
    """Return whether a hook is of weight norm, spectral norm or pruning."""
    return any(base.__module__.startswith("torch.nn.utils.") for base in type(hook).__mro__)


def own_parameter(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return a parameter that a module itself registered; None for one that parametrizations compute."""
    return module._parameters.get(name)
