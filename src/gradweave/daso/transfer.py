"""One exchange between nodes, under way in the background."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradweave.daso.agreement import Agreement, Asked, Verdict, Vote

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
        vote: What this node has to say, but for how the transfer ends.
    """

    def __init__(
        self, number: int, sent: Sequence[torch.Tensor], group: ProcessGroup, agreement: Agreement, vote: Vote
    ) -> None:
        self.began = self.ended = time.perf_counter()
        self.total = [vector.clone() for vector in sent]
        self._sent = sent
        self._number = number
        self._agreement = agreement
        self._vote = vote
        self._works: list[dist.Work | None] = []
        self._begun = True
        try:
            for chunk in chunks(self.total):
                self._works.append(dist.all_reduce(chunk, group=group, async_op=True))
        except RuntimeError:
            self._begun = False
        self._asked = Asked(self._attend, patience=agreement.patience, name=f"gradweave exchange {number}")

    def _attend(self) -> Verdict:
        arrived = self._begun and self._arrive()
        figures = self._vote.figures
        if arrived:
            figures = replace(figures, seconds=self.ended - self.began)
        vote = replace(self._vote, arrived=arrived, finite=all_finite(self._sent), figures=figures)
        return self._agreement.vote(self._number, vote)

    def _arrive(self) -> bool:
        try:
            if self.total and self.total[0].is_cuda:
                with torch.cuda.device(self.total[0].device):
                    self._wait()
                    torch.cuda.current_stream().synchronize()
            else:
                self._wait()
        except RuntimeError:
            return False
        self.ended = time.perf_counter()
        return True

    def _wait(self) -> None:
        """With NCCL this only makes the current stream wait."""
        for work in self._works:
            if work is not None:
                work.wait()

    def result(self) -> Verdict:
        """Waits for the verdict of all nodes; behind it, the sum may be used on the current stream."""
        verdict = self._asked.answer()
        if verdict.counted:
            self._wait()
        return verdict


def chunks(vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parts of vectors that are small enough to be sent."""
    return [part for vector in vectors if vector.numel() for part in vector.split(CHUNK)]


def all_finite(vectors: Sequence[torch.Tensor]) -> bool:
    """Whether no element is infinite or not a number."""
    return all(bool(torch.isfinite(vector.sum(dtype=torch.float64))) for vector in vectors)
