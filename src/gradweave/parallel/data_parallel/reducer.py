"""Averages of gradients over all ranks, message by message, while backward goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from gradweave._compat.autograd import NO_BACKWARD, current_backward
from gradweave._compat.tensors import storage_users
from gradweave._runtime.backward import BackwardEnd
from gradweave._runtime.deferred.pending_gradient import (
    PendingGradient,
    make_gradient_pending,
    make_gradient_plain,
)
from gradweave._runtime.peers.replica_messages import naming_lost_peers
from gradweave.errors import GradweaveError, LostPeerError


class Message:
    """Gradients that travel together, each with a flag that says whether a rank has it.

    Attributes:
        number: Its place in the order of sending, the same on all ranks.
        params: The parameters that have the gradients.
        arrived: Places in ``params`` of the gradients that it holds.
    """

    def __init__(self, number: int, params: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        self.number = number
        self.params = tuple(params)
        self.arrived: set[int] = set()
        self._dtype = dtype
        # Gradients that the loop keeps refer to this: by a strong reference they would keep the message alive, whose
        # memory, in the dtype in which it travels, may not be theirs.
        self._on_use = partial(_wait_for, weakref.ref(self))
        self._averages: list[torch.Tensor] = []
        self._work: Any = None
        self._failure: LostPeerError | None = None
        self._allocate()

    def _allocate(self) -> None:
        """Lay the message out: gradients, then a flag for each, in the dtype in which they travel.

        Averages are views of ``_result``. That is a part of the message itself, unless it travels in another dtype.
        """
        first = self.params[0]
        self._size = sum(p.numel() for p in self.params)
        travels_as = self._dtype or first.dtype
        is_cast = travels_as is not first.dtype
        self._wire = torch.zeros(self._size + len(self.params), dtype=travels_as, device=first.device)
        self._result = first.new_zeros(self._size) if is_cast else self._wire[: self._size]
        self._flags = self._wire[self._size :]
        self._places = _pieces(self._result, self.params)
        self._sources = _pieces(self._wire[: self._size], self.params) if is_cast else self._places
        self._own_users = storage_users(self._result)

    @property
    def is_complete(self) -> bool:
        """Whether every gradient is in it."""
        return len(self.arrived) == len(self.params)

    @property
    def is_on_its_way(self) -> bool:
        """Whether it was sent and not waited for since."""
        return self._work is not None

    @property
    def has_arrived(self) -> bool:
        """Whether waiting for it would return at once."""
        return self._work is None or self._work.is_completed()

    def put(self, place: int, share: float) -> None:
        """Copy a parameter's gradient into it, multiplied by this rank's share of the average."""
        grad = self.params[place].grad
        if grad is None:
            raise GradweaveError("a gradient was taken away before it was averaged; leave .grad alone in hooks")
        if grad.layout is not torch.strided:
            raise GradweaveError(
                f"a sparse gradient of shape {tuple(grad.shape)} cannot be averaged; construct the embedding with "
                "sparse=False"
            )
        if self._averages:
            self._averages = []
            # The averages of the last round are views of this memory. Where the loop still has one of them, or a view
            # of one, this round must not write there.
            if storage_users(self._result) > self._own_users:
                self._allocate()
        torch.mul(grad, share, out=self._sources[place])
        self.arrived.add(place)

    def send(self, group: dist.ProcessGroup | None) -> None:
        """Start averaging; gradients are pending from here on. A missing gradient counts as zero."""
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
            # Summed up, a flag says whether any rank has the gradient. If so, this rank takes the average too; if not,
            # .grad stays None, and the optimizer leaves the parameter out. All ranks see the same sums.
            self.wait()
            counts = self._flags.tolist()
            missing = [place for place in missing if abs(counts[place]) == 0]
        self._averages = [piece.view_as(piece) for piece in self._places]
        for place, (p, grad) in enumerate(zip(self.params, self._averages, strict=True)):
            if place not in missing:
                if self.is_on_its_way:
                    make_gradient_pending(grad, self._on_use)
                p.grad = grad
        self.arrived = set()

    def wait(self) -> None:
        """Wait for the averages; what runs next on the current stream sees them."""
        if self._failure is not None:
            raise self._failure
        if self._work is None:
            return
        # The first reader of a gradient comes here, from a no_grad() or inference_mode() of its own, or from neither.
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
        for grad in self._averages:
            make_gradient_plain(grad)

    def discard(self) -> None:
        """Take away gradients that will never be averaged."""
        if self._work is not None:
            for p in self.params:
                if type(p.grad) is PendingGradient:
                    p.grad = None
            for grad in self._averages:
                make_gradient_plain(grad)
        self._work = self._failure = None


class Reducer:
    """Sends messages in a fixed order, each as soon as it and those before it are complete.

    Ranks match messages by their order alone, so it must be the same on all of them, whatever the order in which
    gradients arrive.

    Each backward that brings gradients is a round. A backward inside a backward, as reentrant checkpoints run them, is
    a round of its own: what is there is averaged at its end, and once more at the end of the outer one, which changes
    nothing.

    Args:
        messages: Parameters of each message, in the order of sending.
        group: The ranks that average; None for one rank.
        dtype: Dtype in which gradients travel; None for their own.
        barrier: Whether the end of backward waits for all messages.
        begins: Called before the first gradient of a round comes in: those of the last must be out of the messages.
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
        self._round = NO_BACKWARD
        """Number of the backward whose messages are being sent."""
        # Weakly: a reducer that is closed is freed at once, with the memory of its messages.
        self._round_end = BackwardEnd(partial(_end_round, weakref.ref(self)))
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
        """Hook a parameter before its gradient is accumulated, and after all hooks of the user's."""
        # The node that accumulates the gradient, and its hooks, live only as long as something refers to it; autograd
        # makes another one for the next graph. So it is kept here. Its hooks run after the parameter's hooks of all
        # kinds, which see and may change the gradient before it is averaged, as with DistributedDataParallel.
        node = get_gradient_edge(p).node
        self._nodes.append(node)
        self._hooks.append(p.register_hook(partial(self._before_accumulation, message, weakref.ref(p))))
        self._hooks.append(node.register_hook(partial(self._accumulated, message, place)))

    def close(self, *, discard: bool = False) -> None:
        """Remove all hooks, after waiting for the messages that are on their way.

        Args:
            discard: Give these messages up instead.
        """
        if discard:
            for message in self.messages:
                message.discard()
        else:
            self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes = [], []
        self._group = None

    def wait(self) -> None:
        """Wait for all messages that are on their way."""
        for message in self.messages:
            message.wait()

    def wait_for(self, params: Sequence[nn.Parameter]) -> None:
        """Wait for the gradients of some parameters."""
        for message in {id(p): self._message_of[id(p)] for p in params}.values():
            message.wait()

    def message_of(self, p: nn.Parameter) -> Message:
        """Return the message in which a parameter's gradient travels."""
        return self._message_of[id(p)]

    def check_ended(self) -> None:
        """Raise GradweaveError if the last backward has failed: ranks would be a step apart from here on."""
        if self._round != NO_BACKWARD and current_backward() == NO_BACKWARD:
            raise GradweaveError(
                f"the last backward failed with {self._next} of {len(self.messages)} messages of gradients sent; other "
                "ranks wait for the rest, or are a step ahead: start again from a checkpoint"
            )

    def _before_accumulation(self, message: Message, param: weakref.ref[nn.Parameter], _: torch.Tensor) -> None:
        # Autograd adds to .grad in C++, which does not ask a pending gradient for its value.
        p = param()
        if p is not None and p.grad is not None:
            self._accumulates(p)
            message.wait()

    def _accumulated(self, message: Message, place: int, *_: Any) -> None:
        if not self.enabled:
            return
        # Torch has no hook for the begin of a backward, but a number for the one that runs: its first gradient begins a
        # round. That also drops the round that a failed backward has left open.
        running = self._round_end.note()
        if running != self._round:
            self._begin_round(running)
        if message.number < self._next:
            raise GradweaveError(
                f"a parameter of shape {tuple(message.params[place].shape)} got its gradient twice in one backward"
            )
        message.wait()
        message.put(place, self._share)
        while self._next < len(self.messages) and self.messages[self._next].is_complete:
            self._send(self.messages[self._next])

    def _begin_round(self, backward: int) -> None:
        self._begins()
        for message in self.messages:
            message.arrived = set()
        self._round, self._next = backward, 0

    def _send(self, message: Message) -> None:
        self._next = message.number + 1
        message.send(self._group)

    def end_round(self, backward: int) -> None:
        """Send the messages that wait for unused parameters: with sums of earlier backwards, or with nothing."""
        if backward != self._round:  # a backward inside this one has sent everything, and no gradient came after it
            return
        for message in self.messages[self._next :]:
            message.wait()
            for place, p in enumerate(message.params):
                if place not in message.arrived and p.grad is not None:
                    message.put(place, self._share)
            self._send(message)
        self._round, self._next = NO_BACKWARD, 0
        if self._barrier:
            self.wait()


def _end_round(reducer: weakref.ref[Reducer], backward: int) -> None:
    if (found := reducer()) is not None:
        found.end_round(backward)


def _wait_for(message: weakref.ref[Message]) -> None:
    if (found := message()) is not None:
        found.wait()


class _Done:
    """Work of a rank that is alone, which is complete from the beginning."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return


def _pieces(flat: torch.Tensor, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a flat tensor as views in the shapes of parameters."""
    parts = flat.split([p.numel() for p in params])
    return [_like(part, p) for part, p in zip(parts, params, strict=True)]


def _like(part: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return a piece of a flat tensor laid out in memory as a parameter is, where that leaves no holes."""
    expected = 1
    for stride, length in sorted(zip(p.stride(), p.shape, strict=True)):
        if length > 1 and stride != expected:
            return part.view(p.shape)
        expected *= length
    return part.as_strided(p.shape, p.stride(), part.storage_offset())
