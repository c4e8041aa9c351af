"""Hooks around an optimizer's step, which itself is not replaced."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from inspect import signature
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.dynamo import outside_of_graphs
from gradweave._compat.optimizers import own_step, put_first_after_step, step_pre_hooks
from gradweave._runtime.optimizer_steps.code_reach import is_torchs
from gradweave._runtime.two_phase_step import is_two_phase


class HiddenParams:
    """Hides parameters from an optimizer's own update for the length of one step.

    Parameters that are already updated, or will be later, must not be updated again. Leaving them out of the groups
    is also cheaper than having the optimizer find that they have no gradient.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._shown: _GroupsOfOneStep | None = None

    def hide_all_but(self, shown: list[nn.Parameter]) -> None:
        """Leave only the given parameters in the groups, until :meth:`restore` or until the step fails."""
        self.restore()
        kept = {id(p) for p in shown}
        groups = self._optimizer.param_groups
        left = [{**group, "params": [p for p in group["params"] if id(p) in kept] if kept else []} for group in groups]
        self._shown = self._optimizer.param_groups = _GroupsOfOneStep(left, groups, sys._getframe(1), self.restore)

    def restore(self) -> None:
        """Give the optimizer all its parameters back."""
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.end()
            if self._optimizer.param_groups is shown:
                self._optimizer.param_groups = shown.full


class _GroupsOfOneStep(list[dict[str, Any]]):
    """Parameter groups that show only some parameters to the step that is running, and all of them to other code.

    torch runs no post-hook if a step raises. So each access looks on the stack whether the step still runs; if it does
    not, the full groups are restored.

    Args:
        left: The groups with the parameters for the running step.
        full: The groups with all their parameters.
        frame: The frame of the step, or one that it has called.
        restore: Gives the optimizer the full groups back.
    """

    def __init__(
        self,
        left: list[dict[str, Any]],
        full: list[dict[str, Any]],
        frame: FrameType,
        restore: Callable[[], None],
    ) -> None:
        super().__init__(left)
        self.full = full
        self._thread = threading.get_ident()
        self._step: FrameType | None = _frame_of_step(frame)
        self._restore = restore

    def end(self) -> None:
        """Show all parameters from now on, and keep no frame alive."""
        self._step = None

    def _now(self) -> list[dict[str, Any]] | None:
        """Return the full groups, or None for the running step."""
        if self._step is None or self._thread != threading.get_ident():
            return self.full
        if _is_on_stack(self._step):
            return None
        self._restore()
        return self.full

    def __iter__(self) -> Iterator[dict[str, Any]]:
        now = self._now()
        return super().__iter__() if now is None else iter(now)

    def __len__(self) -> int:
        now = self._now()
        return super().__len__() if now is None else len(now)

    def __getitem__(self, index: Any) -> Any:
        now = self._now()
        return super().__getitem__(index) if now is None else now[index]

    def append(self, group: dict[str, Any]) -> None:
        """Add a group to the full groups, such as by ``add_param_group`` after a step that has failed."""
        now = self._now()
        (super() if now is None else now).append(group)  # type: ignore[union-attr]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (self.full,)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[dict[str, Any]]:
        return copy.deepcopy(self.full, memo)


def _frame_of_step(frame: FrameType) -> FrameType:
    """Return the frame in which torch calls a step's hooks and update; the given one if it is not found."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename != _FILE_OF_STEP_WRAPPER:
        found = found.f_back
    return frame if found is None else found


_FILE_OF_STEP_WRAPPER = Optimizer.profile_hook_step.__code__.co_filename


class StepHooks:
    """Calls one function just before an optimizer's own update, and one just after it.

    The optimizer's ``step`` is not replaced, and may have been wrapped by a scheduler or a scaler. Where a class's
    ``step`` calls its parent's, which runs the hooks again, only the outer call counts.

    Some steps have to be in stock order: a compiled step; a step with arguments besides a closure, which a deferred
    update would lack; and a step of an unknown class with a closure, which it may call at any time, or twice.

    Args:
        optimizer: The optimizer.
        before: Called after the closure, if there is one, with whether no other hook runs before the update. A hook
            that was added later may still change gradients; this one is moved to the end for the next step.
        after: Called before all other post-hooks.
        check_stock_order: Called with the reason for a step in stock order; may raise to refuse it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        before: Callable[[bool], None],
        after: Callable[[], None],
        *,
        check_stock_order: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.optimizer = optimizer
        self._before = before
        self._after = after
        self._check_stock_order = check_stock_order
        self._calls_closure_first = is_torchs(optimizer) or is_two_phase(optimizer)
        self._takes_closure_first = _first_argument(own_step(optimizer)) == "closure"
        self._outer: FrameType | None = None
        self._pre = optimizer.register_step_pre_hook(self._pre_hook)
        try:
            self._post = optimizer.register_step_post_hook(self._post_hook)
        except BaseException:
            self._pre.remove()
            raise
        put_first_after_step(optimizer, self._post.id)

    def remove(self) -> None:
        """Remove both hooks."""
        self._pre.remove()
        self._post.remove()

    @property
    def is_last(self) -> bool:
        """Whether no other hook runs between ``before`` and the update."""
        return bool(next(reversed(step_pre_hooks(self.optimizer))) == self._pre.id)

    def _pre_hook(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return self._before_compiled()
        # The frame of the outer step may be one that raised, whose post-hooks never ran: then it is not on the stack.
        if self._outer is not None and _is_on_stack(self._outer):
            return None
        self._outer = _frame_of_step(sys._getframe(1))
        last = self.is_last
        position = len(args) > 1 and self._takes_closure_first
        closure = args[1] if position else kwargs.get("closure")
        if len(args) > 1 + position or kwargs.keys() - {"closure"}:
            self._check_stock_order("step() with arguments besides a closure")
            self._before(False)
            return None
        if closure is None:
            self._before(last)
            return None
        if not self._calls_closure_first:
            self._check_stock_order(f"a closure for {type(self.optimizer).__name__}, which may call it at any time")
            self._before(False)
            return None

        def closure_then_before() -> Any:
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                self._before(last)
            return loss

        if position:
            return (args[0], closure_then_before), kwargs
        return args, {**kwargs, "closure": closure_then_before}

    def _post_hook(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            self._after_compiled()
            return
        if self._outer is not None and _frame_of_step(sys._getframe(1)) is not self._outer:
            return
        self._outer = None
        if not self.is_last:
            self._pre.remove()
            self._pre = self.optimizer.register_step_pre_hook(self._pre_hook)
        self._after()

    @outside_of_graphs
    def _before_compiled(self) -> None:
        """Take a step that Dynamo has compiled in stock order, as if another hook followed."""
        self._check_stock_order("a compiled optimizer.step()")
        self._before(False)

    @outside_of_graphs
    def _after_compiled(self) -> None:
        self._after()


def _first_argument(step: Callable[..., Any]) -> str:
    """Return the name of a step's first argument besides its optimizer; empty if it has none."""
    try:
        return next(iter([*signature(step).parameters][1:]), "")
    except (TypeError, ValueError):  # the signature of a C function may be unknown
        return ""


def _is_on_stack(wanted: FrameType) -> bool:
    """Return whether a frame is still running in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is wanted


def stack_depth() -> int:
    """Return the depth of nested calls: a step that another step calls has a greater one."""
    depth, frame = 0, sys._getframe(1)
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    return depth
