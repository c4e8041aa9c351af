"""Stand-ins for the gradients of a layer that are still being computed when autograd hands them on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from weakref import WeakSet, ref

import torch

from gradweave._compat.autograd import will_be_accumulated
from gradweave._runtime.deferred.late import LateGradient
from gradweave._runtime.optimizer_steps.partial import no_autocast
from gradweave._runtime.split_calls.gradient_node import sum_of
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.task import Gradients, Task
from gradweave.errors import GradweaveError


class DeferredLayerGradients:
    """The gradients of one layer, handed on before backward has waited for them.

    On a GPU everything that the tasks read and make is kept until the stream of the backward has waited for it: only
    then may that memory be used again.

    Args:
        queue: The queue that has the tasks.
        tasks: The tasks whose results sum up to the gradients.
        params: The weight and, if there is one, its bias.

    Attributes:
        is_over: Whether nothing is kept any more but the gradients.
    """

    def __init__(self, queue: WeightGradientQueue, tasks: list[Task], params: list[torch.Tensor]) -> None:
        self.is_over = False
        self._params = [ref(p) for p in params]  # weakly: the stand-ins in their .grad keep this alive
        self._queue = queue
        self._tasks = tasks
        self._gradients: list[torch.Tensor] = []
        self._sources: WeakSet[_GradientSource] = WeakSet()
        self._layouts = [(p.dtype, torch.empty_like(p, device="meta")) for p in params]
        self._device = params[0].device
        self._backward_stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        self._ready_event: torch.cuda.Event | None = None

    def stand_ins(self) -> Gradients:
        """Return stand-ins for the gradients of the weight and of its bias."""
        sources = [_GradientSource(self, index) for index in range(len(self._params))]
        self._sources.update(sources)
        late = [LateGradient(find(), source) for find, source in zip(self._params, sources, strict=True)]  # type: ignore[arg-type]
        return late[0], late[1] if len(late) > 1 else None

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of the tasks, if it is not that of the backward."""
        return self._queue.lane.stream

    @property
    def is_wanted(self) -> bool:
        """Whether a stand-in is still alive."""
        return len(self._sources) > 0

    @property
    def is_in_grad(self) -> bool:
        """Whether a stand-in is still where backward has put it, so that no step has taken it over."""
        return any((p := find()) is not None and self._is_own(p.grad) for find in self._params)

    def _is_own(self, gradient: torch.Tensor | None) -> bool:
        # An update that has taken a stand-in over shows one with another source.
        return type(gradient) is LateGradient and gradient.source in self._sources

    def settle(self) -> list[torch.Tensor]:
        """Finish the gradients on the stream of the backward, let the current stream wait, and return them."""
        if not self.is_over:
            with torch.cuda.stream(self._backward_stream) if self._backward_stream is not None else nullcontext():
                if self._ready_event is not None and self._backward_stream is not None:
                    self._backward_stream.wait_event(self._ready_event)
                self.ready()
                self.done()
        if self._backward_stream is not None and self._backward_stream != torch.cuda.current_stream(self._device):
            torch.cuda.current_stream(self._device).wait_stream(self._backward_stream)
        return self._gradients

    def settle_in_place(self) -> None:
        """Finish the gradients, and replace the stand-ins in ``.grad`` by them."""
        gradients = self.settle()
        for find, gradient in zip(self._params, gradients, strict=True):
            if (p := find()) is not None and self._is_own(p.grad):
                p.grad = gradient

    def ready(self) -> list[torch.Tensor]:
        """Let the current stream alone wait for the gradients, and return them."""
        if not self._gradients:
            with torch.inference_mode(False), torch.no_grad(), no_autocast(self._device):
                for task in self._tasks:
                    self._queue.make_ready(task)
                self._gradients = self._shaped([task.result for task in self._tasks])
            if self._backward_stream is not None:
                # The sums were made on the current stream: others must wait for it, not for the tasks alone.
                self._ready_event = torch.cuda.current_stream(self._device).record_event()
        return self._gradients

    def done(self, after: torch.cuda.Event | None = None) -> None:
        """Release what the gradients were made from, on the stream of the backward, to which that memory belongs.

        Args:
            after: The end of what another stream does with the gradients; the stream of the backward waits for it.
        """
        if not self.is_over:
            with torch.cuda.stream(self._backward_stream) if self._backward_stream is not None else nullcontext():
                if after is not None and self._backward_stream is not None:
                    self._backward_stream.wait_event(after)
                for task in self._tasks:
                    self._queue.finish(task)
                    task.drop()
            self._end()

    def drop(self) -> None:
        """Release everything: the gradients are not wanted."""
        if not self.is_over:
            for task in self._tasks:
                self._queue.drop(task)
            self._end()

    def _end(self) -> None:
        self._tasks = []
        self.is_over = True

    def _shaped(self, results: list[Gradients]) -> list[torch.Tensor]:
        """Return the sums over all calls in the parameters' types and layouts, as autograd would leave them."""
        shaped = []
        for (dtype, like), gradient in zip(self._layouts, sum_of(results), strict=False):  # no bias, no gradient of it
            if gradient is None:
                raise GradweaveError("a call has left no gradient for a parameter that needs one")
            gradient = gradient.to(dtype)
            if not _have_same_layout(gradient, like):
                gradient = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=self._device).copy_(
                    gradient
                )
            shaped.append(gradient)
        return shaped


class _GradientSource:
    """One of a layer's gradients, as the source of a stand-in."""

    def __init__(self, layer: DeferredLayerGradients, index: int) -> None:
        self._layer = layer
        self._index = index

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream of the computation, if it runs beside the backward."""
        return self._layer.stream

    def settle(self) -> torch.Tensor:
        """Return the gradient, for use on the current stream and on that of the backward."""
        return self._layer.settle()[self._index]

    def ready(self) -> torch.Tensor:
        """Return the gradient, for use on the current stream alone; :meth:`done` must follow."""
        return self._layer.ready()[self._index]

    def done(self, after: torch.cuda.Event | None = None) -> None:
        """Let the stream of the backward wait for an event, the end of what followed :meth:`ready`."""
        self._layer.done(after)


def may_defer(p: torch.Tensor) -> bool:
    """Return whether autograd puts a parameter's gradient into ``.grad`` as it is, without reading it."""
    return (
        p.is_leaf
        and p.requires_grad
        and p.grad is None
        and _have_same_layout(torch.empty_like(p, device="meta"), p)
        and will_be_accumulated(p)
    )


def are_of_layer(
    weights: Mapping[int, tuple[torch.Tensor, torch.Tensor | None]],
    layer: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> bool:
    """Return whether weight and bias are those of one layer, and not a weight with the bias of another layer."""
    own = weights.get(layer)
    return own is not None and own[0] is weight and own[1] is bias


def _have_same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have the same strides; those of single elements do not count."""
    pairs = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size <= 1 or a == b for size, a, b in pairs)
