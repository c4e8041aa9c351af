"""Noticing the end of each backward, under a loop that does not tell."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.utils.hooks import RemovableHandle

from gradweave._compat.eager import at_end_of_backward, current_backward
from gradweave.errors import GradweaveError

_SEEN = "_gradweave_seen"


class BackwardWatch:
    """Calls back when a backward has ended, and knows which parameters have new gradients.

    Args:
        ended: Called on the thread that runs the backward, before it returns to the user.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._hooks: dict[int, RemovableHandle] = {}
        self._fresh: set[int] = set()
        self._backward = -1
        self._paused = False
        self._sentinel: torch.Tensor | None = None

    def refresh(self, params: Iterable[torch.Tensor]) -> bool:
        """Watches those that have come in since; says whether one of them has a gradient already."""
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
        """Looks for gradients that no backward has brought; says whether there are any, or any left over."""
        self.refresh(params)
        self._fresh.update(id(p) for p in params if p.grad is not None and _mark(p.grad) != p.grad._version)
        return bool(self._fresh)

    def _accumulated(self, p: torch.Tensor) -> None:
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise GradweaveError(
                f"a parameter of shape {tuple(p.shape)} has a {p.grad.layout} gradient, which DASO cannot average; "
                "construct its embedding with sparse=False"
            )
        self._fresh.add(id(p))
        if self._backward != current_backward():
            self._backward = current_backward()
            at_end_of_backward(self._end)

    def _end(self) -> None:
        self._backward = -1
        if not self._paused and self._fresh:
            self._ended()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards inside only accumulate."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def take_fresh(self, params: Iterable[torch.Tensor]) -> list[int]:
        """For each parameter whether it has had a new gradient since this was asked last."""
        flags = [int(id(p) in self._fresh) for p in params]
        self._fresh.clear()
        return flags

    def remember(self, params: Iterable[torch.Tensor]) -> None:
        """Marks gradients, to find out later whether they have been cleared, or written by somebody else."""
        self._sentinel = None
        for p in params:
            if p.grad is not None:
                setattr(p.grad, _SEEN, p.grad._version)
                self._sentinel = self._sentinel if self._sentinel is not None else p

    @property
    def cleared(self) -> bool:
        """Whether gradients have been cleared since the last backward; in place counts as not."""
        return self._sentinel is None or _mark(self._sentinel.grad) is None

    def detach(self) -> None:
        """Watches no longer."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()


def _mark(gradient: torch.Tensor | None) -> int | None:
    return getattr(gradient, _SEEN, None)
