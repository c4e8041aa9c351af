"""Weight gradients that cross the border of a step: finished just before their update, in the next forward.

A weight's ``.grad`` is a stand-in meanwhile. Forward-fusion takes it over at ``step()`` and has it finished
when the update begins; anybody else who uses it has it finished at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from weakref import WeakSet, ref

import torch

from gradweave.compat.eager import has_gradient_hooks
from gradweave.errors import GradweaveError
from gradweave.fusion.late import LateGradient
from gradweave.fusion.stepping import no_autocast
from gradweave.split.queue import Gradients, Task, WeightGradientQueue
from gradweave.split.taps import sum_of

Weights = Mapping[int, tuple[torch.Tensor, torch.Tensor | None]]
"""Weight and bias of a layer, by its number."""


class Crossing:
    """Hands stand-ins on for the gradients of some layers, and keeps what they come from.

    A layer's gradient is waited for in backward after all where something needs it there: gradients to
    accumulate onto, hooks on the weight, an input that the loop may write to, a CUDA graph of one step that is
    being captured and must end with all of its work joined.

    Args:
        queue: Where backward leaves the tasks.
        layers: Whose gradients may cross.
        may_cross_in_graph: Whether a CUDA graph that is being captured holds the next step too.

    Attributes:
        weights: Of the forward that ran last.
        crossed: How many gradients were handed on before they were there.
    """

    def __init__(
        self,
        queue: WeightGradientQueue,
        layers: frozenset[int],
        may_cross_in_graph: Callable[[], bool] = lambda: False,
    ) -> None:
        self.layers = layers
        self._may_cross_in_graph = may_cross_in_graph
        self.weights: Weights = {}
        self.crossed = 0
        self._queue = queue
        self._open: list[_Layer] = []
        queue.late = self

    def take(self, layer: int, tasks: Sequence[Task]) -> Gradients | None:
        """Stand-ins for a layer's gradients; None if they are to be waited for."""
        if layer not in self.layers or layer not in self.weights or not tasks:
            return None
        if _capturing() and not self._may_cross_in_graph():
            return None
        if torch.is_grad_enabled() or not all(task.can_outlive for task in tasks):
            return None
        weight, bias = self.weights[layer]
        params = [weight] if bias is None else [weight, bias]
        if not all(_can_wait(p) for p in params):
            return None
        for task in tasks:
            self._queue.outlive(task)
        made = _Layer(self._queue, list(tasks), params)
        self._open.append(made)
        self.crossed += 1
        late = [LateGradient(p, made.part(number)) for number, p in enumerate(params)]
        return late[0], late[1] if bias is not None else None

    def begin_forward(self, weights: Weights) -> None:
        """Takes note of the weights as they are now; finishes what nobody has taken over since backward."""
        still_open = []
        for layer in self._open:
            if not layer.is_wanted:
                layer.drop()
            elif layer.is_in_grad:
                layer.settle()
            elif not layer.is_over:
                still_open.append(layer)
        self._open = still_open
        self.weights = weights

    def close(self) -> None:
        """Finishes everything; no gradient crosses from now on."""
        self.layers = frozenset()
        for layer in self._open:
            if layer.is_wanted:
                layer.settle()
            else:
                layer.drop()
        self._open = []


class _Layer:
    """The gradients of one layer that have not been waited for.

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

    def part(self, number: int) -> _Part:
        """Where the weight's gradient comes from (0), or the bias's (1)."""
        part = _Part(self, number)
        self._parts.add(part)
        return part

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still has a stand-in."""
        return len(self._parts) > 0

    @property
    def is_in_grad(self) -> bool:
        """Whether a stand-in is where backward has put it: no step has taken it over."""
        return any((p := known()) is not None and type(p.grad) is LateGradient for known in self._params)

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

    def done(self) -> None:
        """Lets go of what the gradients were made from."""
        if not self.is_over:
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
        for (dtype, like), gradient in zip(self._layouts, sum_of(results), strict=False):
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

    def __init__(self, layer: _Layer, number: int) -> None:
        self._layer = layer
        self._number = number

    def settle(self) -> torch.Tensor:
        """The gradient, for the current stream and that of the backward."""
        return self._layer.settle()[self._number]

    def ready(self) -> torch.Tensor:
        """The gradient, for the current stream alone."""
        return self._layer.ready()[self._number]

    def done(self) -> None:
        """The stream of the backward is behind what came after :meth:`ready`."""
        self._layer.done()


def _can_wait(p: torch.Tensor) -> bool:
    """Whether nothing needs a parameter's gradient in backward."""
    return (
        p.is_leaf
        and p.requires_grad
        and p.grad is None
        and not has_gradient_hooks(p)
        and _same_layout(torch.empty_like(p, device="meta"), p)
    )


def _same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape lie in memory alike; strides of single elements do not count."""
    pairs = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size <= 1 or a == b for size, a, b in pairs)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
