"""Standing in front of an optimizer's step without replacing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.compat.eager import put_first_behind_step, step_pre_hooks


class HiddenParams:
    """Keeps parameters out of an optimizer's own update for the length of one step.

    What is already updated, or will be, must not be updated again; leaving it out of the groups
    is also cheaper than letting the optimizer find that there is nothing to do.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[dict[str, Any]] | None = None

    def hide_all_but(self, shown: list[nn.Parameter]) -> None:
        """From now to :meth:`restore` the optimizer has only these parameters."""
        self.restore()
        groups = self._groups = self._optimizer.param_groups
        kept = {id(p) for p in shown}
        self._optimizer.param_groups = [
            {**group, "params": [p for p in group["params"] if id(p) in kept] if kept else []} for group in groups
        ]

    def restore(self) -> None:
        """Gives the optimizer all its parameters back."""
        if self._groups is not None:
            self._optimizer.param_groups = self._groups
            self._groups = None


class StepHooks:
    """Calls ``before`` just before an optimizer's own update and ``after`` behind it.

    The optimizer's ``step`` stays what it is, also where a scheduler or a scaler has wrapped it.
    ``before`` comes after a closure and is told whether it is the last hook before the update: one
    that was added later may still change gradients. The order is mended for the next step.
    ``after`` comes before every other hook behind the step. Where a class's ``step`` calls its
    parent's, which runs the hooks again, only the outer call counts.
    """

    def __init__(self, optimizer: Optimizer, before: Callable[[bool], None], after: Callable[[], None]) -> None:
        self.optimizer = optimizer
        self._before = before
        self._after = after
        self._outer: int | None = None
        self._pre = optimizer.register_step_pre_hook(self._pre_hook)
        try:
            self._post = optimizer.register_step_post_hook(self._post_hook)
        except BaseException:
            self._pre.remove()
            raise
        put_first_behind_step(optimizer, self._post.id)

    def remove(self) -> None:
        """Takes both hooks away."""
        self._pre.remove()
        self._post.remove()

    @property
    def is_last(self) -> bool:
        """Whether no other hook runs between ``before`` and the update."""
        return bool(next(reversed(step_pre_hooks(self.optimizer))) == self._pre.id)

    def _pre_hook(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        depth = stack_depth()
        if self._outer is not None and depth > self._outer:
            return None
        self._outer = depth
        last = self.is_last
        position = 1 if len(args) > 1 else None
        closure = args[1] if position else kwargs.get("closure")
        if closure is None:
            self._before(last)
            return None

        def closure_then_before() -> Any:
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                self._before(last)
            return loss

        if position:
            return (args[0], closure_then_before, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_before}

    def _post_hook(self, *_: Any) -> None:
        if self._outer is not None and stack_depth() > self._outer:
            return
        self._outer = None
        if not self.is_last:
            self._pre.remove()
            self._pre = self.optimizer.register_step_pre_hook(self._pre_hook)
        self._after()


def stack_depth() -> int:
    """How deep the calls are nested: a step inside a step is deeper than it."""
    depth, frame = 0, sys._getframe(1)
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    return depth
