"""Stand-ins for the gradients of a layer that are still being computed when autograd hands them on."""

from __future__ import annotations

from contextlib import nullcontext
from weakref import WeakSet, ref

import torch

from gradweave._compat.eager import will_be_accumulated
from gradweave._runtime.deferred.late import LateGradient
from gradweave._runtime.optimizer_steps.partial import no_autocast
from gradweave._runtime.split_calls.gradient_node import sum_of
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.task import Gradients, Task
from gradweave.errors import GradweaveError


class HandedOn:
    """The gradients of one layer, handed on before they were waited for.

    Args:
        queue: Where the tasks are.
        tasks: Whose results sum up to the gradients.
        params: The weight and, if there is one, its bias.

    On a GPU everything that the tasks read and make is kept until the stream of the backward is behind it:
    only then may that memory be used again.

    Attributes:
        is_over: Whether nothing is kept any more but the gradients.
    """

    def __init__(self, queue: WeightGradientQueue, tasks: list[Task], params: list[torch.Tensor]) -> None:
        self.is_over = False
        self._params = [ref(p) for p in params]  # weakly: their .grad leads here
        self._queue = queue
        self._tasks = tasks
        self._made: list[torch.Tensor] = []
        self._parts: WeakSet[_Part] = WeakSet()
        self._layouts = [(p.dtype, torch.empty_like(p, device="meta")) for p in params]
        self._device = params[0].device
        self._main = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        self._elsewhere: torch.cuda.Event | None = None

    def stand_ins(self) -> Gradients:
        """For the gradients of the weight and of its bias."""
        parts = [_Part(self, number) for number in range(len(self._params))]
        self._parts.update(parts)
        late = [LateGradient(known(), part) for known, part in zip(self._params, parts, strict=True)]  # type: ignore[arg-type]
        return late[0], late[1] if len(late) > 1 else None

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where the gradients are computed, if that is beside the backward."""
        return self._queue.place.stream

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still has a stand-in."""
        return len(self._parts) > 0

    @property
    def is_in_grad(self) -> bool:
        """Whether a stand-in is where backward has put it: no step has taken it over."""
        return any((p := known()) is not None and self._is_ours(p.grad) for known in self._params)

    def _is_ours(self, gradient: torch.Tensor | None) -> bool:
        """Whether that is a stand-in as backward has made it, not what an update that has taken it over shows."""
        return type(gradient) is LateGradient and gradient.source in self._parts

    def settle(self) -> list[torch.Tensor]:
        """Finishes the gradients on the stream of the backward; the current one waits for that."""
        if not self.is_over:
            with torch.cuda.stream(self._main) if self._main is not None else nullcontext():
                if self._elsewhere is not None and self._main is not None:
                    self._main.wait_event(self._elsewhere)
                self.ready()
                self.done()
        if self._main is not None and self._main != torch.cuda.current_stream(self._device):
            torch.cuda.current_stream(self._device).wait_stream(self._main)
        return self._made

    def settle_in_place(self) -> None:
        """Finishes the gradients, and puts them where stand-ins are in ``.grad``."""
        made = self.settle()
        for known, gradient in zip(self._params, made, strict=True):
            if (p := known()) is not None and self._is_ours(p.grad):
                p.grad = gradient

    def ready(self) -> list[torch.Tensor]:
        """Lets the current stream alone wait for the gradients."""
        if not self._made:
            with torch.inference_mode(False), torch.no_grad(), no_autocast(self._device):
                for task in self._tasks:
                    self._queue.make_ready(task)
                self._made = self._shaped([task.result for task in self._tasks])
            if self._main is not None:
                self._elsewhere = torch.cuda.current_stream(self._device).record_event()
        return self._made

    def done(self, after: torch.cuda.Event | None = None) -> None:
        """Lets go of what the gradients were made from: for the stream of the backward, whose memory that is."""
        if not self.is_over:
            with torch.cuda.stream(self._main) if self._main is not None else nullcontext():
                if after is not None and self._main is not None:
                    self._main.wait_event(after)
                for task in self._tasks:
                    self._queue.finish(task)
                    task.drop()
            self._end()

    def drop(self) -> None:
        """Lets go of everything: nobody will ask."""
        if not self.is_over:
            for task in self._tasks:
                self._queue.drop(task)
            self._end()

    def _end(self) -> None:
        self._tasks = []
        self.is_over = True

    def _shaped(self, results: list[Gradients]) -> list[torch.Tensor]:
        """The sums over all calls, in the parameters' precision and layout, as autograd would leave them."""
        made = []
        for (dtype, like), gradient in zip(self._layouts, sum_of(results), strict=False):  # no bias, no gradient of it
            if gradient is None:
                raise GradweaveError("a call has left no gradient for a parameter that needs one")
            gradient = gradient.to(dtype)
            if not _same_layout(gradient, like):
                gradient = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=self._device).copy_(
                    gradient
                )
            made.append(gradient)
        return made


class _Part:
    """One of a layer's gradients, as a stand-in knows it."""

    def __init__(self, layer: HandedOn, number: int) -> None:
        self._layer = layer
        self._number = number

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where the gradient is computed, if that is beside the backward."""
        return self._layer.stream

    def settle(self) -> torch.Tensor:
        """The gradient, for the current stream and that of the backward."""
        return self._layer.settle()[self._number]

    def ready(self) -> torch.Tensor:
        """The gradient, for the current stream alone."""
        return self._layer.ready()[self._number]

    def done(self, after: torch.cuda.Event | None = None) -> None:
        """What came after :meth:`ready` ends with an event; the stream of the backward waits for that."""
        self._layer.done(after)


def can_wait(p: torch.Tensor) -> bool:
    """Whether autograd puts a parameter's gradient into ``.grad`` as it is, without a look at it."""
    return (
        p.is_leaf
        and p.requires_grad
        and p.grad is None
        and _same_layout(torch.empty_like(p, device="meta"), p)
        and will_be_accumulated(p)
    )


def _same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape lie in memory alike; strides of single elements do not count."""
    pairs = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size <= 1 or a == b for size, a, b in pairs)
