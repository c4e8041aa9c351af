"""The end of a backward, which autograd tells only to those who ask while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import ismethod

import torch
from torch.utils.hooks import RemovableHandle

from gradweave._compat.autograd import NO_BACKWARD, at_end_of_backward, current_backward
from gradweave._compat.tensors import version_of
from gradweave.errors import GradweaveError

_SEEN = "_gradweave_seen"
"""Attribute of a gradient: its version when :meth:`BackwardWatch.remember` saw it.

An attribute goes with the tensor: clearing or replacing ``p.grad`` removes the mark, and a write in place outdates it.
A ``WeakKeyDictionary`` would compare gradients by value, element by element, and torch's dictionaries with weak keys
take 3.2 us per gradient and step, where this takes 0.2 us.
"""


class BackwardEnd:
    """Calls back once at the end of each backward in which :meth:`note` was called.

    Autograd takes callbacks only while a backward runs, and runs them on the thread that called it, before it returns.
    It does not run them if the backward fails. A backward inside another, as reentrant checkpoints run them, has an end
    of its own, so that several can be noted at a time.

    Args:
        ended: Called with the number of the backward that has ended.
    """

    def __init__(self, ended: Callable[[int], None]) -> None:
        # A method is held weakly: its object holds this one, and a cycle would keep both until a garbage collection.
        self._find_ended = weakref.WeakMethod(ended) if ismethod(ended) else lambda: ended
        self._noted: set[int] = set()

    def note(self) -> int:
        """Ask for a call at the end of the backward that runs now, once; return its number."""
        running = current_backward()
        if running not in self._noted:
            self._noted.add(running)
            at_end_of_backward(partial(self._end, running))
        return running

    def _end(self, backward: int) -> None:
        # Forgotten before the call, which may raise: the next backward then asks again.
        self._noted.discard(backward)
        ended = self._find_ended()
        if ended is not None:
            ended(backward)

    @property
    def is_pending(self) -> bool:
        """Whether a backward that was noted has not ended: it is running, or has failed."""
        return bool(self._noted)

    @property
    def has_failed(self) -> bool:
        """Whether a backward that was noted can no longer end, since none is running on this thread."""
        return bool(self._noted) and current_backward() == NO_BACKWARD

    def forget(self) -> None:
        """Forget backwards that have failed."""
        self._noted.clear()


class BackwardWatch:
    """Watch of backwards: calls back when one has ended, and knows which parameters have new gradients.

    Args:
        ended: Called on the thread that runs the backward, before it returns to the user.
        technique: What averages the gradients, for messages.
    """

    def __init__(self, ended: Callable[[], None], *, technique: str) -> None:
        self._ended = ended
        self._technique = technique
        self._hooks: dict[int, RemovableHandle] = {}
        self._fresh: set[int] = set()
        self._end = BackwardEnd(self._backward_ended)
        self._paused = False
        self._sentinel: torch.Tensor | None = None

    def refresh(self, params: Iterable[torch.Tensor]) -> bool:
        """Watch parameters that are new; return whether one of them has a gradient already."""
        new = [p for p in params if p.requires_grad and id(p) not in self._hooks]
        # Autograd holds on to hooks in a way that garbage collection cannot see through.
        this = weakref.ref(self)

        def accumulated(p: torch.Tensor) -> None:
            watch = this()
            if watch is not None:
                watch._accumulated(p)

        for p in new:
            self._hooks[id(p)] = p.register_post_accumulate_grad_hook(accumulated)
        late = [p for p in new if p.grad is not None]
        self._fresh.update(id(p) for p in late)
        return bool(late)

    def notice(self, params: Iterable[torch.Tensor]) -> bool:
        """Look for gradients that no backward has brought; return whether there are any, or any left over."""
        self.refresh(params)
        self._fresh.update(id(p) for p in params if p.grad is not None and _mark(p.grad) != version_of(p.grad))
        return bool(self._fresh)

    def _accumulated(self, p: torch.Tensor) -> None:
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise GradweaveError(
                f"a parameter of shape {tuple(p.shape)} has a {p.grad.layout} gradient, which {self._technique} cannot "
                "average; construct its embedding with sparse=False"
            )
        self._fresh.add(id(p))
        self._end.note()

    def _backward_ended(self, _: int) -> None:
        if not self._paused and self._fresh:
            self._ended()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which backwards only accumulate."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def take_fresh(self, params: Iterable[torch.Tensor]) -> list[int]:
        """Return, for each parameter, whether it has had a new gradient since the last call."""
        flags = [int(id(p) in self._fresh) for p in params]
        self._fresh.clear()
        return flags

    def remember(self, params: Iterable[torch.Tensor]) -> None:
        """Mark gradients, to find out later whether they were cleared, or written by other code."""
        self._sentinel = None
        for p in params:
            if p.grad is not None:
                # setattr: tensors do not declare the attribute.
                setattr(p.grad, _SEEN, version_of(p.grad))
                self._sentinel = self._sentinel if self._sentinel is not None else p

    @property
    def cleared(self) -> bool:
        """Whether gradients have been cleared since the last backward; in place counts as not."""
        return self._sentinel is None or _mark(self._sentinel.grad) is None

    def detach(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


def _mark(gradient: torch.Tensor | None) -> int | None:
    return getattr(gradient, _SEEN, None)
