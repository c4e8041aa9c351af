"""The transfer of one exchange between nodes, in the background."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradweave._runtime.peers.contact import is_lost_contact
from gradweave.parallel.daso.consensus import Agreement, Verdict, Vote
from gradweave.parallel.daso.flat_buffers import Pool

CHUNK = 2**26
"""Most elements in one message: collective libraries count bytes in 32 bits in places."""


class Transfer:
    """A sum of vectors over nodes that does not hold up the step, followed by a vote on whether it counted.

    It works on a copy: whatever happens to a transfer, neither the weights nor the sent vectors change.

    Args:
        number: Number of the exchange.
        sent: This node's vectors.
        group: One rank of each node.
        agreement: Votes with the other nodes.
        vote: This node's vote, completed when the transfer ends; its figures have the duration of the last vote.
        pool: Memory for the copy.

    Attributes:
        total: The sum; valid after :meth:`result`.
        began, ended, judged: Times of the start, the end and the verdict.
    """

    def __init__(
        self,
        number: int,
        sent: Sequence[torch.Tensor],
        group: ProcessGroup,
        agreement: Agreement,
        vote: Vote,
        pool: Pool,
    ) -> None:
        self.began = self.ended = self.judged = time.perf_counter()
        self._sent = sent
        self._number = number
        self._agreement = agreement
        self._members = agreement.members
        self._vote = vote
        self._works: list[dist.Work | None] = []
        self._has_begun = True
        self._own_error: RuntimeError | None = None
        self._side = _SideStream(sent)
        with self._side.entered():
            self.total = pool.copy(sent)
            try:
                for chunk in chunks(self.total):
                    self._works.append(dist.all_reduce(chunk, group=group, async_op=True))
            except RuntimeError as error:
                self._has_begun = False
                self._keep_own(error)
        # A thread waits for the sum and votes, since no rank may hold up its training for either. It does not read
        # agreement.members itself: these may have changed by then.
        self._asked = agreement.ask(self._attend, name=f"gradweave exchange {number}")

    def _attend(self) -> Verdict:
        with self._side.again():
            arrived = self._has_begun and self._arrive()
            vote = replace(self._vote, arrived=arrived)
            if arrived:
                figures = self._vote.figures
                vote = replace(vote, figures=replace(figures, seconds=figures.seconds + self.ended - self.began))
                if not all_finite(self.total):
                    # It must not be merged; the vote tells whose vectors are the cause.
                    vote = replace(vote, finite=all_finite(self._sent), holds=False)
        verdict = self._agreement.vote(self._number, vote, self._members)
        self.judged = time.perf_counter()
        return verdict

    def _arrive(self) -> bool:
        try:
            for work in self._works:
                if work is not None:
                    work.wait()
            self._side.synchronize()
        except RuntimeError as error:
            self._keep_own(error)
            return False
        finally:
            # A work object keeps the group's connections alive.
            self._works.clear()
        self.ended = time.perf_counter()
        return True

    def _keep_own(self, error: RuntimeError) -> None:
        """Keep an error of this rank's own device for :meth:`result`: the other nodes must hear the vote first.

        Lost contact is not kept: the verdict has it, and a traceback would keep the group alive.
        """
        if not is_lost_contact(error):
            self._own_error = error

    def result(self) -> Verdict:
        """Wait for the verdict of all nodes; after it, the sum may be used on the current stream."""
        verdict = self._asked.answer()
        if self._own_error is not None:
            raise self._own_error
        self._side.join(self.total)
        return verdict


class _SideStream:
    """A stream of its own for a transfer on a GPU, so that waiting for it holds up nothing else; nothing on a CPU."""

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        self._device = vectors[0].device if vectors and vectors[0].is_cuda else None
        self._stream = None if self._device is None else torch.cuda.Stream(self._device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Return the context of the thread that computed the sent vectors."""
        if self._stream is not None:
            # They may still be under way on that thread's stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.again():
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Return the context of any thread, later: the current stream and device belong to each thread."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                yield

    def synchronize(self) -> None:
        """Wait for everything on the stream so far."""
        if self._stream is not None:
            self._stream.synchronize()

    def join(self, vectors: Sequence[torch.Tensor]) -> None:
        """Let the current stream use vectors that were made on this one."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            # Their memory was allocated on the side stream: without this, the allocator could hand it out again while
            # the current stream still reads it.
            for vector in vectors:
                vector.record_stream(current)


def chunks(vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return parts of vectors that are small enough for one message."""
    return [part for vector in vectors if vector.numel() for part in vector.split(CHUNK)]


def all_finite(vectors: Sequence[torch.Tensor]) -> bool:
    """Return whether no element is infinite or not a number."""
    return all(bool(torch.isfinite(torch.stack(vector.aminmax())).all()) for vector in vectors if vector.numel())
