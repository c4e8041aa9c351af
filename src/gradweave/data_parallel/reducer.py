"""Averaging gradients over all ranks, bucket by bucket, while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradweave.compat.eager import at_end_of_backward, current_backward
from gradweave.compat.tracing import NO_BACKWARD
from gradweave.data_parallel.gradients import is_pending, pending_class
from gradweave.errors import GradweaveError


class LostRankError(GradweaveError):
    """A rank did not take part in averaging gradients."""


class GradientBucket:
    """Gradients that travel in one message, and for each of them whether a rank has it.

    Attributes:
        number: Its place in the order of sending, the same on all ranks.
        params: Whose gradients.
        views: Where their averages will be.
    """

    def __init__(self, number: int, params: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        self.number = number
        self.params = tuple(params)
        first = self.params[0]
        self._size = sum(p.numel() for p in self.params)
        travels_as = dtype or first.dtype
        self._message = torch.zeros(self._size + len(self.params), dtype=travels_as, device=first.device)
        same = travels_as is first.dtype
        self._result = self._message[: self._size] if same else first.new_zeros(self._size)
        self._flags = self._message[self._size :]
        self.views = _pieces(self._result, self.params)
        self._sources = self.views if same else _pieces(self._message[: self._size], self.params)
        self._class = pending_class(self.wait)
        self._work: Any = None
        self.arrived: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every gradient is there."""
        return len(self.arrived) == len(self.params)

    @property
    def is_on_its_way(self) -> bool:
        """Whether it was sent and nobody has waited for it."""
        return self._work is not None

    def put(self, place: int, share: float) -> None:
        """Takes a parameter's gradient in, times this rank's share of the average."""
        grad = self.params[place].grad
        if grad is None:
            raise GradweaveError("a gradient was taken away before it was averaged; leave .grad alone in hooks")
        if grad.layout is not torch.strided:
            raise GradweaveError(
                f"a sparse gradient of shape {tuple(grad.shape)} cannot be averaged; construct the embedding with "
                "sparse=False"
            )
        torch.mul(grad, share, out=self._sources[place])
        self.arrived.add(place)

    def send(self, group: dist.ProcessGroup | None, size: int) -> None:
        """Starts averaging; gradients are pending from now on. What is missing counts as zero."""
        for place in range(len(self.params)):
            if place not in self.arrived:
                self._sources[place].zero_()
        self._flags.fill_(1.0)
        missing = [place for place in range(len(self.params)) if place not in self.arrived]
        for place in missing:
            self._flags[place] = 0.0
        if size > 1:
            with _named(self.number):
                self._work = dist.all_reduce(self._message, group=group, async_op=True)
        else:
            self._work = _Done()
        if missing:
            self.wait()
            counts = self._flags.tolist()
        for place, (p, view) in enumerate(zip(self.params, self.views, strict=True)):
            if place in self.arrived or counts[place] > 0:
                if not missing:
                    view.__class__ = self._class
                p.grad = view
        self.arrived = set()

    def wait(self) -> None:
        """Lets whoever comes next see the averages."""
        if self._work is None:
            return
        work, self._work = self._work, None
        with torch.inference_mode(False), torch.no_grad():
            with _named(self.number):
                work.wait()
            if self._result.dtype is not self._message.dtype:
                self._result.copy_(self._message[: self._size])
        for view in self.views:
            view.__class__ = torch.Tensor

    def is_seen(self) -> bool:
        """Whether gradients that are on their way are still in ``.grad``, where backward would add to them."""
        return self.is_on_its_way and any(p.grad is view for p, view in zip(self.params, self.views, strict=True))


class Reducer:
    """Sends buckets in a fixed order, each as soon as it and those before it are complete.

    Args:
        buckets: Parameters of each bucket, in the order of sending.
        group: Whose ranks average; None for the default one.
        size: How many they are.
        dtype: What gradients travel as; None for their own precision.
        barrier: Whether the end of backward waits for all of them.
        begins: Called before a backward's first gradient comes in: those of the last must be out of the buckets.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        group: dist.ProcessGroup | None,
        size: int,
        *,
        dtype: torch.dtype | None = None,
        barrier: bool = False,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self._begins = begins
        self.buckets = [GradientBucket(number, params, dtype) for number, params in enumerate(buckets)]
        self.enabled = True
        self._group = group
        self._size = size
        self._barrier = barrier
        self._place = {id(p): (bucket, at) for bucket in self.buckets for at, p in enumerate(bucket.params)}
        self._next = 0
        self._backward = NO_BACKWARD
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._arrived) for bucket in self.buckets for p in bucket.params
        ]

    def close(self) -> None:
        """Waits for what is on its way, and lets go of the parameters."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def wait(self) -> None:
        """Waits for everything that is on its way."""
        for bucket in self.buckets:
            bucket.wait()

    def wait_for(self, params: Sequence[nn.Parameter]) -> None:
        """Waits for the gradients of some parameters."""
        for bucket in {id(self._place[id(p)][0]): self._place[id(p)][0] for p in params}.values():
            bucket.wait()

    def before_backward(self) -> None:
        """Gradients of the last backward that are still in place will be added to: they must be there."""
        for bucket in self.buckets:
            if bucket.is_seen():
                bucket.wait()

    @property
    def is_torn(self) -> bool:
        """Whether a backward has ended with some of its buckets sent and others not."""
        return 0 < self._next < len(self.buckets) and self._backward != current_backward()

    def _arrived(self, p: torch.Tensor) -> None:
        if not self.enabled:
            return
        running = current_backward()
        if running != self._backward:
            self._begin(running)
        bucket, place = self._place[id(p)]
        if bucket.is_on_its_way and is_pending(p.grad):
            raise GradweaveError(
                "a second backward has added to gradients that were still being averaged; call the model through "
                "DataParallel, and let it return tensors"
            )
        if place in bucket.arrived or bucket.number < self._next:
            raise GradweaveError(
                f"a parameter of shape {tuple(p.shape)} got its gradient twice in one backward, as in reentrant "
                "checkpoints that share it; use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.wait()
        bucket.put(place, 1.0 / self._size)
        self._send_complete()

    def _begin(self, running: int) -> None:
        if self.is_torn:
            raise GradweaveError(
                f"the last backward failed after {self._next} of {len(self.buckets)} buckets of gradients were sent: "
                "other ranks wait for the rest; start again from a checkpoint"
            )
        self._begins()
        for bucket in self.buckets:
            bucket.arrived = set()
        self._backward = running
        self._next = 0
        at_end_of_backward(self._end)

    def _send_complete(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].is_complete:
            self._send(self.buckets[self._next])

    def _send(self, bucket: GradientBucket) -> None:
        self._next = bucket.number + 1
        bucket.send(self._group, self._size)

    def _end(self) -> None:
        """Sends what unused parameters have held up: sums of earlier backwards, or nothing."""
        for bucket in self.buckets[self._next :]:
            for place, p in enumerate(bucket.params):
                if place not in bucket.arrived and p.grad is not None and not is_pending(p.grad):
                    bucket.put(place, 1.0 / self._size)
            self._send(bucket)
        self._backward = NO_BACKWARD
        self._next = 0
        if self._barrier:
            self.wait()


class _Done:
    """The work of a rank that is alone."""

    def wait(self) -> None:
        """There is nothing to wait for."""


class _named(AbstractContextManager[None]):  # noqa: N801
    """Context in which the backend's errors say what happened here."""

    def __init__(self, bucket: int) -> None:
        self._bucket = bucket

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise LostRankError(
                f"gradients could not be averaged (message {self._bucket}): a rank is lost, or has run out of batches "
                "before the others; give every rank the same number of batches, or start again from a checkpoint: "
                f"{str(error).splitlines()[0]}"
            ) from error


def _pieces(flat: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A flat tensor in the shapes of parameters."""
    parts = flat.split([p.numel() for p in params])
    return [_like(part, p) for part, p in zip(parts, params, strict=True)]


def _like(part: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A piece of a flat tensor laid out as a parameter is, where that leaves no holes."""
    dense = sorted(zip(p.stride(), p.shape, strict=True), reverse=True)
    expected = 1
    for stride, length in reversed(dense):
        if length > 1 and stride != expected:
            return part.view(p.shape)
        expected *= length
    return part.as_strided(p.shape, p.stride())
