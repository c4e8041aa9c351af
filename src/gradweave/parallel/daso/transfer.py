"""One exchange between nodes, under way in the background."""

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
"""Most elements in one message: collective libraries count bytes in 32 bits here and there."""


class Transfer:
    """Sums up vectors over nodes without holding up the step, then agrees with them whether that counted.

    It works on a copy: whatever happens to a transfer, neither weights nor what was sent are touched.

    Args:
        number: Of the exchange.
        sent: What this node sends.
        group: Of one rank per node.
        agreement: With the other nodes.
        vote: What this node has to say, but for how the transfer ends; its figures have the seconds of a vote.
        pool: Where the copy comes from.
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
        self._aside = _Aside(sent)
        with self._aside.entered():
            self.total = pool.copy(sent)
            try:
                for chunk in chunks(self.total):
                    self._works.append(dist.all_reduce(chunk, group=group, async_op=True))
            except RuntimeError as error:
                self._has_begun = False
                self._keep_own(error)
        self._asked = agreement.ask(self._attend, name=f"gradweave exchange {number}")

    def _attend(self) -> Verdict:
        with self._aside.again():
            arrived = self._has_begun and self._arrive()
            vote = replace(self._vote, arrived=arrived)
            if arrived:
                figures = self._vote.figures
                vote = replace(vote, figures=replace(figures, seconds=figures.seconds + self.ended - self.began))
                if not all_finite(self.total):
                    vote = replace(vote, finite=all_finite(self._sent), holds=False)
        verdict = self._agreement.vote(self._number, vote, self._members)
        self.judged = time.perf_counter()
        return verdict

    def _arrive(self) -> bool:
        try:
            for work in self._works:
                if work is not None:
                    work.wait()
            self._aside.synchronize()
        except RuntimeError as error:
            self._keep_own(error)
            return False
        finally:
            # They hold on to what the group is made of.
            self._works.clear()
        self.ended = time.perf_counter()
        return True

    def _keep_own(self, error: RuntimeError) -> None:
        """Keeps an error of this rank's own device for :meth:`result`: others must hear the vote first.

        Lost contact is not kept: it is in the verdict, and a traceback would keep the group alive.
        """
        if not is_lost_contact(error):
            self._own_error = error

    def result(self) -> Verdict:
        """Waits for the verdict of all nodes; after it, the sum may be used on the current stream."""
        verdict = self._asked.answer()
        if self._own_error is not None:
            raise self._own_error
        self._aside.join(self.total)
        return verdict


class _Aside:
    """A stream of its own for a transfer on a GPU, on which waiting for it holds up nothing else."""

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        self._device = vectors[0].device if vectors and vectors[0].is_cuda else None
        self._stream = None if self._device is None else torch.cuda.Stream(self._device)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """From the thread that has made what is sent."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.again():
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """From any thread, later."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                yield

    def synchronize(self) -> None:
        """Waits for what was asked of the stream so far."""
        if self._stream is not None:
            self._stream.synchronize()

    def join(self, vectors: Sequence[torch.Tensor]) -> None:
        """Lets the current stream use what was made here."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for vector in vectors:
                vector.record_stream(current)


def chunks(vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parts of vectors that are small enough to be sent."""
    return [part for vector in vectors if vector.numel() for part in vector.split(CHUNK)]


def all_finite(vectors: Sequence[torch.Tensor]) -> bool:
    """Whether no element is infinite or not a number."""
    return all(bool(torch.isfinite(torch.stack(vector.aminmax())).all()) for vector in vectors if vector.numel())
