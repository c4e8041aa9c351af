"""Standing in front of an optimizer's step without replacing it."""

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
from gradweave._compat.eager import own_step, put_first_behind_step, step_pre_hooks
from gradweave._runtime.optimizer_steps.code_reach import is_torchs
from gradweave._runtime.optimizer_steps.partial import begins_whole


class HiddenParams:
    """Keeps parameters out of an optimizer's own update for the length of one step.

    What is already updated, or will be, must not be updated again; leaving it out of the groups
    is also cheaper than letting the optimizer find that there is nothing to do.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._shown: _GroupsOfOneStep | None = None

    def hide_all_but(self, shown: list[nn.Parameter]) -> None:
        """From now to :meth:`restore`, or until the step fails, the optimizer has only these parameters."""
        self.restore()
        kept = {id(p) for p in shown}
        groups = self._optimizer.param_groups
        left = [{**group, "params": [p for p in group["params"] if id(p) in kept] if kept else []} for group in groups]
        self._shown = self._optimizer.param_groups = _GroupsOfOneStep(left, groups, sys._getframe(1), self.restore)

    def restore(self) -> None:
        """Gives the optimizer all its parameters back."""
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.end()
            if self._optimizer.param_groups is shown:
                self._optimizer.param_groups = shown.all_of_them


class _GroupsOfOneStep(list[dict[str, Any]]):
    """An optimizer's groups while its own update runs; all of them again once that is over, also if it has failed.

    torch calls no hook behind a step that raised. So whether the step still runs is looked up on the stack, each time
    that the groups are asked for.

    Args:
        left: What the update is to see.
        all_of_them: The groups with all their parameters.
        frame: One that lives as long as the step, or a frame that it has called.
        restore: Puts all of them back.
    """

    def __init__(
        self,
        left: list[dict[str, Any]],
        all_of_them: list[dict[str, Any]],
        frame: FrameType,
        restore: Callable[[], None],
    ) -> None:
        super().__init__(left)
        self.all_of_them = all_of_them
        self._thread = threading.get_ident()
        self._step: FrameType | None = _frame_of_step(frame)
        self._restore = restore

    def end(self) -> None:
        """The step is over: these show all groups from now on, and keep no frame alive."""
        self._step = None

    def _now(self) -> list[dict[str, Any]] | None:
        """All groups, unless it is the step itself that asks."""
        if self._step is None or self._thread != threading.get_ident():
            return self.all_of_them
        if _is_on_stack(self._step):
            return None
        self._restore()
        return self.all_of_them

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
        """Add a group to all of them, as ``add_param_group`` does behind a step that has failed."""
        now = self._now()
        (super() if now is None else now).append(group)  # type: ignore[union-attr]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (self.all_of_them,)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[dict[str, Any]]:
        return copy.deepcopy(self.all_of_them, memo)


def _frame_of_step(frame: FrameType) -> FrameType:
    """The frame in which torch calls the hooks and the update of a step; the given one if that cannot be told."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename != _HOOKS_ARE_CALLED_IN:
        found = found.f_back
    return frame if found is None else found


_HOOKS_ARE_CALLED_IN = Optimizer.profile_hook_step.__code__.co_filename


class StepHooks:
    """Calls ``before`` just before an optimizer's own update and ``after`` behind it.

    The optimizer's ``step`` stays what it is, also where a scheduler or a scaler has wrapped it.
    ``before`` comes after a closure and is told whether it is the last hook before the update: one
    that was added later may still change gradients. The order is put right for the next step.
    ``after`` comes before every other hook behind the step. Where a class's ``step`` calls its
    parent's, which runs the hooks again, only the outer call counts. A step that is compiled is
    taken in stock order, and so is one that is given anything but a closure, which an update that is put off would
    be taken without, or a closure that a step of an unknown kind may call at any time, or twice; ``check_stock_order``
    is told why, and may refuse.
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
        self._calls_closure_first = is_torchs(optimizer) or begins_whole(optimizer)
        self._takes_closure_first = _first_argument(own_step(optimizer)) == "closure"
        self._outer: FrameType | None = None
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
        if torch.compiler.is_compiling():
            return self._before_compiled()
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
        """Dynamo has compiled the step: it is taken in stock order, as if a hook behind this one asked for that."""
        self._check_stock_order("a compiled optimizer.step()")
        self._before(False)

    @outside_of_graphs
    def _after_compiled(self) -> None:
        self._after()


def _first_argument(step: Callable[..., Any]) -> str:
    """The name of what a step is given first besides its optimizer; empty if it takes nothing."""
    try:
        return next(iter([*signature(step).parameters][1:]), "")
    except (TypeError, ValueError):  # of a function that is not of Python
        return ""


def _is_on_stack(wanted: FrameType) -> bool:
    """Whether a frame is still running, in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return frame is wanted


def stack_depth() -> int:
    """How deep the calls are nested: a step inside a step is deeper than it."""
    depth, frame = 0, sys._getframe(1)
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    return depth
