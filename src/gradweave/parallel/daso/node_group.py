"""Collectives inside a node, whose ranks may run out of batches at different steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from gradweave._runtime.peers.contact import lost_contact_as
from gradweave.parallel.daso.failures import lost_in_node
from gradweave.parallel.daso.topology import Groups, Topology
from gradweave.parallel.daso.transfer import chunks

_STEP_BASE = 4096
"""Headers are float32, to travel with gradients, and sums over ranks: a step in one number would be inexact from 2**24
over the number of ranks, so that it is sent as two digits in this base."""


class Purpose(IntEnum):
    """Why the ranks of a node meet; its number is part of a header."""

    BACKWARD = 1
    """To average gradients."""
    STEP_END = 2
    """To exchange or merge weights at the end of a step."""
    LEAVE = 3
    """To end, since none of them has batches left."""


@dataclass(frozen=True)
class Meeting:
    """What all ranks of a node know after a :meth:`NodeGroup.gather`.

    Attributes:
        purpose: Why they met.
        step: The step of those that still train.
        active: Places of those.
        fresh: For each parameter, the number of ranks that have a new gradient.
    """

    purpose: Purpose
    step: int
    active: tuple[int, ...]
    fresh: tuple[int, ...]


class NodeGroup:
    """The ranks of this node; with a single one, nothing is sent.

    Every method that sends takes the present ``step``, for the error if a rank is lost, and ``place``, the place of the
    rank that has what is sent.

    Attributes:
        active: Places of the ranks that still had batches at the last meeting.
    """

    def __init__(self, topology: Topology, groups: Groups) -> None:
        self._topology = topology
        self._groups = groups
        self._message = torch.empty(0)
        self.active: tuple[int, ...] = tuple(range(topology.places))

    @property
    def is_single(self) -> bool:
        """Whether the node has one rank."""
        return self._groups.node is None

    @property
    def is_uneven(self) -> bool:
        """Whether some, but not all ranks of the node have run out of batches."""
        return 0 < len(self.active) < self._topology.places

    def gather(
        self, purpose: Purpose, step: int, fresh: Sequence[int], vectors: list[torch.Tensor], *, active: bool
    ) -> Meeting:
        """Sum vectors over the node, in place, together with a header: who trains, and what they are about to do.

        While all ranks have batches, they meet in each backward and nowhere else, with one message. A rank that has run
        out sends zeros, once; from then on the header is a message of its own, and vectors follow only if the meeting
        is for a backward.

        Args:
            purpose: Why this rank comes; ignored if it is not active.
            step: Its step.
            fresh: For each parameter, whether it has a new gradient.
            vectors: Gradients.
            active: Whether this rank still trains.
        """
        places, header_first = self._topology.places, self.is_uneven
        own = [int(active and place == self._topology.place) for place in range(places)]
        about = [purpose, *divmod(step, _STEP_BASE), *fresh] if active else [0] * (3 + len(fresh))
        header = torch.tensor([*own, *about], dtype=torch.float32)
        if header_first or not self._carries_header(vectors):
            self.sum_up_numbers(header, step)
        else:
            message = self._message
            if len(message) != len(header) + len(vectors[0]):
                message = self._message = torch.empty(len(header) + len(vectors[0]))
            message[: len(header)].copy_(header)
            message[len(header) :].copy_(vectors[0])
            self.sum_up([message], step)
            header, total = message.split([len(header), len(vectors[0])])
            vectors[0].copy_(total)
            vectors = vectors[1:]
        numbers = [round(number) for number in header.tolist()]
        present = tuple(place for place in range(places) if numbers[place])
        self.active = present or self.active
        # All active ranks come for the same purpose at the same step, so that each sum is a multiple of their number.
        purposes, high, low, *counts = numbers[places:]
        agreed = Purpose(purposes // len(present)) if present else Purpose.LEAVE
        if not header_first or agreed is Purpose.BACKWARD:
            self.sum_up(vectors, step)
        at = (high * _STEP_BASE + low) // len(present) if present else step
        return Meeting(agreed, at, present, tuple(counts))

    def _carries_header(self, vectors: Sequence[torch.Tensor]) -> bool:
        """Return whether the header may be part of the first vector: not on a GPU, which reading it would wait for."""
        return bool(vectors) and vectors[0].device.type == "cpu" and vectors[0].dtype is torch.float32

    def sum_up(self, vectors: Sequence[torch.Tensor], step: int) -> None:
        """Sum vectors over the node, in place."""
        if self._groups.node is not None:
            with self._naming_lost_ranks(step):
                for chunk in chunks(vectors):
                    dist.all_reduce(chunk, group=self._groups.node)

    def sum_up_numbers(self, numbers: torch.Tensor, step: int) -> None:
        """Sum a tensor in host memory over the node, in place."""
        if self._groups.control is not None:
            with self._naming_lost_ranks(step):
                dist.all_reduce(numbers, group=self._groups.control)

    def broadcast(self, vectors: Sequence[torch.Tensor], place: int, step: int) -> None:
        """Overwrite vectors on all ranks of the node by those of one."""
        if self._groups.node is not None:
            with self._naming_lost_ranks(step):
                for chunk in chunks(vectors):
                    dist.broadcast(chunk, self._topology.rank_at(place), group=self._groups.node)

    def broadcast_numbers(self, numbers: list[float] | None, length: int, place: int, step: int) -> list[float]:
        """Return the numbers of one rank on all ranks of the node, padded with -1.

        Args:
            numbers: The numbers; None on the other ranks.
            length: Count of numbers that is sent: the others must know it beforehand.
            place: Place of the rank that has them.
            step: The present step.
        """
        padded = [*(numbers or []), *[-1.0] * length][:length]
        # float64 is exact for integers, such as steps, up to 2**53.
        message = torch.tensor(padded, dtype=torch.float64)
        if self._groups.control is not None:
            with self._naming_lost_ranks(step):
                dist.broadcast(message, self._topology.rank_at(place), group=self._groups.control)
        return list(message.tolist())

    def broadcast_object(self, thing: Any, place: int, step: int) -> Any:
        """Return the object of one rank on all ranks of the node; it is pickled, for rare moments."""
        if self._groups.control is None:
            return thing
        box = [thing]
        with self._naming_lost_ranks(step):
            dist.broadcast_object_list(box, self._topology.rank_at(place), group=self._groups.control)
        return box[0]

    def _naming_lost_ranks(self, step: int) -> AbstractContextManager[None]:
        return lost_contact_as(lambda _: lost_in_node(self._topology, step))
