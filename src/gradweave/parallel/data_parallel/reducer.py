"""Averaging gradients over all ranks, message by message, while backward goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gradweave._compat.eager import NO_BACKWARD, at_end_of_backward, current_backward, storage_users
from gradweave._runtime.deferred.pending_gradient import (
    PendingGradient,
    make_gradient_pending,
    make_gradient_plain,
)
from gradweave.errors import GradweaveError, LostPeerError
from gradweave.parallel.data_parallel.failures import naming_lost_peers


class Message:
    """Gradients that travel together, and for each of them whether a rank has it.

    Attributes:
        number: Its place in the order of sending, the same on all ranks.
        params: Whose gradients.
        arrived: Places of those that are in it.
    """

    def __init__(self, number: int, params: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        self.number = number
        self.params = tuple(params)
        self.arrived: set[int] = set()
        self._dtype = dtype
        self._on_use = partial(_wait_for, weakref.ref(self))
        self._handed: list[torch.Tensor] = []
        self._work: Any = None
        self._failure: LostPeerError | None = None
        self._make()

    def _make(self) -> None:
        first = self.params[0]
        self._size = sum(p.numel() for p in self.params)
        travels_as = self._dtype or first.dtype
        same = travels_as is first.dtype
        self._wire = torch.zeros(self._size + len(self.params), dtype=travels_as, device=first.device)
        self._result = self._wire[: self._size] if same else first.new_zeros(self._size)
        self._flags = self._wire[self._size :]
        self._places = _pieces(self._result, self.params)
        self._sources = self._places if same else _pieces(self._wire[: self._size], self.params)
        self._users = storage_users(self._result)

    @property
    def is_complete(self) -> bool:
        """Whether every gradient is there."""
        return len(self.arrived) == len(self.params)

    @property
    def is_on_its_way(self) -> bool:
        """Whether it was sent and nobody has waited for it."""
        return self._work is not None

    @property
    def has_arrived(self) -> bool:
        """Whether nobody would have to wait for it."""
        return self._work is None or self._work.is_completed()

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
        if self._handed:
            self._handed = []
            if storage_users(self._result) > self._users:
                self._make()  # somebody has kept gradients of the last step
        torch.mul(grad, share, out=self._sources[place])
        self.arrived.add(place)

    def send(self, group: dist.ProcessGroup | None) -> None:
        """Starts averaging; gradients are pending from now on. What is missing counts as zero."""
        missing = [place for place in range(len(self.params)) if place not in self.arrived]
        self._flags.fill_(1)
        for place in missing:
            self._sources[place].zero_()
            self._flags[place] = 0
        self._work = _Done()
        if group is not None:
            with naming_lost_peers(f"gradients could not be averaged (message {self.number})"):
                self._work = dist.all_reduce(self._wire, group=group, async_op=True)
        if missing:
            self.wait()
            counts = self._flags.tolist()
            missing = [place for place in missing if abs(counts[place]) == 0]
        self._handed = [piece.view_as(piece) for piece in self._places]
        for place, (p, grad) in enumerate(zip(self.params, self._handed, strict=True)):
            if place not in missing:
                if self.is_on_its_way:
                    make_gradient_pending(grad, self._on_use)
                p.grad = grad
        self.arrived = set()

    def wait(self) -> None:
        """Lets whoever comes next see the averages."""
        if self._failure is not None:
            raise self._failure
        if self._work is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            try:
                with naming_lost_peers(f"gradients could not be averaged (message {self.number})"):
                    self._work.wait()
            except LostPeerError as error:
                self._failure = error
                raise
            self._work = None
            if self._result.dtype is not self._wire.dtype:
                self._result.copy_(self._wire[: self._size])
        for grad in self._handed:
            make_gradient_plain(grad)

    def give_up(self) -> None:
        """Takes away gradients that will never be averaged."""
        if self._work is not None:
            for p in self.params:
                if type(p.grad) is PendingGradient:
                    p.grad = None
            for grad in self._handed:
                make_gradient_plain(grad)
        self._work = self._failure = None


class Reducer:
    """Sends messages in a fixed order, each as soon as it and those before it are complete.

    A backward inside a backward, as reentrant checkpoints have it, is a round of its own: what is there is
    averaged at its end, and once more at the end of the outer one, which changes nothing.

    Args:
        messages: Parameters of each message, in the order of sending.
        group: Whose ranks average; None for one rank.
        dtype: What gradients travel as; None for their own precision.
        barrier: Whether the end of backward waits for all of them.
        begins: Called before a backward's first gradient comes in: those of the last must be out of the messages.
        accumulates: Called with a parameter before anything is added to its gradient.
    """

    def __init__(
        self,
        messages: Sequence[Sequence[nn.Parameter]],
        group: dist.ProcessGroup | None,
        *,
        dtype: torch.dtype | None = None,
        barrier: bool = False,
        begins: Callable[[], None] = lambda: None,
        accumulates: Callable[[nn.Parameter], None] = lambda _: None,
    ) -> None:
        self.messages = [Message(number, params, dtype) for number, params in enumerate(messages)]
        self.enabled = True
        self._group = group
        self._share = 1.0 / (dist.get_world_size(group) if group is not None else 1)
        self._barrier = barrier
        self._begins = begins
        self._accumulates = accumulates
        self._next = 0
        self._backward = NO_BACKWARD
        self._message_of = {id(p): message for message in self.messages for p in message.params}
        self._nodes: list[Any] = []
        self._hooks: list[Any] = []
        try:
            for message in self.messages:
                for place, p in enumerate(message.params):
                    self._watch(message, place, p)
        except BaseException:
            self.close()
            raise

    def _watch(self, message: Message, place: int, p: nn.Parameter) -> None:
        """Hears of a gradient before it is added, and behind all hooks of the user's.

        The node that adds it up must be kept: autograd makes another one if nobody has it.
        """
        node = get_gradient_edge(p).node
        self._nodes.append(node)
        self._hooks.append(p.register_hook(partial(self._comes, message, weakref.ref(p))))
        self._hooks.append(node.register_hook(partial(self._arrived, message, place)))

    def close(self, *, give_up: bool = False) -> None:
        """Waits for what is on its way, or gives it up, and lets go of the parameters."""
        if give_up:
            for message in self.messages:
                message.give_up()
        else:
            self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes = [], []
        self._group = None

    def wait(self) -> None:
        """Waits for everything that is on its way."""
        for message in self.messages:
            message.wait()

    def wait_for(self, params: Sequence[nn.Parameter]) -> None:
        """Waits for the gradients of some parameters."""
        for message in {id(p): self._message_of[id(p)] for p in params}.values():
            message.wait()

    def message_of(self, p: nn.Parameter) -> Message:
        """What a parameter's gradient travels in."""
        return self._message_of[id(p)]

    def check_ended(self) -> None:
        """Raises if the last backward did not come to its end: ranks would be a step apart from here on."""
        if self._backward != NO_BACKWARD and current_backward() == NO_BACKWARD:
            raise GradweaveError(
                f"the last backward failed with {self._next} of {len(self.messages)} messages of gradients sent; other "
                "ranks wait for the rest, or are a step ahead: start again from a checkpoint"
            )

    def _comes(self, message: Message, param: weakref.ref[nn.Parameter], _: torch.Tensor) -> None:
        p = param()
        if p is not None and p.grad is not None:
            self._accumulates(p)
            message.wait()

    def _arrived(self, message: Message, place: int, *_: Any) -> None:
        if not self.enabled:
            return
        running = current_backward()
        if running != self._backward:
            self._begins()
            for one in self.messages:
                one.arrived = set()
            self._backward, self._next = running, 0
            at_end_of_backward(partial(self._end, running))
        if message.number < self._next:
            raise GradweaveError(
                f"a parameter of shape {tuple(message.params[place].shape)} got its gradient twice in one backward"
            )
        message.wait()
        message.put(place, self._share)
        while self._next < len(self.messages) and self.messages[self._next].is_complete:
            self._send(self.messages[self._next])

    def _send(self, message: Message) -> None:
        self._next = message.number + 1
        message.send(self._group)

    def _end(self, backward: int) -> None:
        """Sends what unused parameters have held up: sums of earlier backwards, or nothing."""
        if backward != self._backward:
            return
        for message in self.messages[self._next :]:
            message.wait()
            for place, p in enumerate(message.params):
                if place not in message.arrived and p.grad is not None:
                    message.put(place, self._share)
            self._send(message)
        self._backward, self._next = NO_BACKWARD, 0
        if self._barrier:
            self.wait()


def _wait_for(message: weakref.ref[Message]) -> None:
    """Wait for a message that may be gone: gradients that are kept keep none of its memory alive."""
    if (found := message()) is not None:
        found.wait()


class _Done:
    """The work of a rank that is alone."""

    def is_completed(self) -> bool:
        """It always is."""
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""


def _pieces(flat: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A flat tensor in the shapes of parameters."""
    parts = flat.split([p.numel() for p in params])
    return [_like(part, p) for part, p in zip(parts, params, strict=True)]


def _like(part: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A piece of a flat tensor laid out as a parameter is, where that leaves no holes."""
    expected = 1
    for stride, length in sorted(zip(p.stride(), p.shape, strict=True)):
        if length > 1 and stride != expected:
            return part.view(p.shape)
        expected *= length
    return part.as_strided(p.shape, p.stride(), part.storage_offset())
