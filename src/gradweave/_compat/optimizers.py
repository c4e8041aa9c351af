"""Private names of torch.optim: the step and its hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks


def own_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """Return the update of an optimizer's class, without the step hooks that torch wraps around it."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def step_pre_hooks(optimizer: Optimizer) -> dict[int, Any]:
    """Return the hooks that run before a step, in their order."""
    return optimizer._optimizer_step_pre_hooks


def put_first_after_step(optimizer: Optimizer, hook: int) -> None:
    """Make one of the hooks that run after a step the first of them."""
    hooks: dict[int, Any] = optimizer._optimizer_step_post_hooks
    others = [(number, callback) for number, callback in hooks.items() if number != hook]
    for number, _ in others:
        del hooks[number]
    hooks.update(others)


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Return a context in which an optimizer's hooks do not run, even if its step calls its parent's."""
    before, behind = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, behind


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell schedulers and step hooks that a step was taken without ``optimizer.step()``."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
    for hook in (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
        hook(optimizer, (optimizer,), {})
