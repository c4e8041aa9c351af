"""The ranks of one node: they average gradients in every step, and some may run out of batches before others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from gradweave._runtime.peers.contact import lost_contact_as
from gradweave.parallel.daso.failures import lost_mates
from gradweave.parallel.daso.topology import Groups, Topology
from gradweave.parallel.daso.transfer import chunks

_STEP_BASE = 4096
"""Steps are sent in two digits, each of which float32 holds exactly."""


class Call(IntEnum):
    """Why the ranks of a node come together."""

    BACKWARD = 1
    """Gradients are to be averaged."""
    TICK = 2
    """A step has ended at which weights are exchanged or merged."""
    LEAVE = 3
    """Nobody has batches left."""


@dataclass(frozen=True)
class Round:
    """What all ranks of a node know after coming together.

    Attributes:
        call: Why.
        step: Which step those that still train are at.
        active: Places of those.
        flags: For each parameter, how many ranks have a new gradient.
    """

    call: Call
    step: int
    active: tuple[int, ...]
    flags: tuple[int, ...]


class Mates:
    """Collectives inside a node; with one rank per node they do nothing."""

    def __init__(self, topology: Topology, groups: Groups) -> None:
        self._topology = topology
        self._groups = groups
        self._message = torch.empty(0)
        self.active: tuple[int, ...] = tuple(range(topology.places))
        """Places of the ranks that still have batches, as of the last round."""

    @property
    def alone(self) -> bool:
        """Whether there is one rank per node."""
        return self._groups.mates is None

    @property
    def uneven(self) -> bool:
        """Whether some, but not all ranks of the node have run out of batches."""
        return 0 < len(self.active) < self._topology.places

    def gather(
        self, call: Call, step: int, flags: Sequence[int], vectors: list[torch.Tensor], *, active: bool
    ) -> Round:
        """Sums vectors over the node, in place, together with who trains and what they are about to do.

        While all ranks have batches, they come together in each backward and nowhere else, with one message.
        A rank that has run out sends zeros, once; from then on a message of its own says beforehand what
        is to be done, and vectors follow only if that is a backward.
        """
        places, beforehand = self._topology.places, self.uneven
        own = [int(active and place == self._topology.place) for place in range(places)]
        about = [call, *divmod(step, _STEP_BASE), *flags] if active else [0] * (3 + len(flags))
        header = torch.tensor([*own, *about], dtype=torch.float32)
        if beforehand or not self._carries_header(vectors):
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
        total, high, low, *new = numbers[places:]
        doing = Call(total // len(present)) if present else Call.LEAVE
        if not beforehand or doing is Call.BACKWARD:
            self.sum_up(vectors, step)
        at = (high * _STEP_BASE + low) // len(present) if present else step
        return Round(doing, at, present, tuple(new))

    def _carries_header(self, vectors: Sequence[torch.Tensor]) -> bool:
        """Whether numbers may travel with the first vector: not on a GPU, where reading them would wait for it."""
        return bool(vectors) and vectors[0].device.type == "cpu" and vectors[0].dtype is torch.float32

    def sum_up(self, vectors: Sequence[torch.Tensor], step: int) -> None:
        """Sums vectors over the node, in place."""
        if self._groups.mates is not None:
            with self._naming_lost_mates(step):
                for chunk in chunks(vectors):
                    dist.all_reduce(chunk, group=self._groups.mates)

    def sum_up_numbers(self, numbers: torch.Tensor, step: int) -> None:
        """Sums a tensor on the host over the node, in place."""
        if self._groups.control is not None:
            with self._naming_lost_mates(step):
                dist.all_reduce(numbers, group=self._groups.control)

    def share(self, vectors: Sequence[torch.Tensor], place: int, step: int) -> None:
        """Gives everybody in the node what one has."""
        if self._groups.mates is not None:
            with self._naming_lost_mates(step):
                for chunk in chunks(vectors):
                    dist.broadcast(chunk, self._topology.mate(place), group=self._groups.mates)

    def tell(self, numbers: list[float] | None, length: int, place: int, step: int) -> list[float]:
        """Numbers that one rank has, for everybody in the node; None from the others. Padded with -1."""
        padded = [*(numbers or []), *[-1.0] * length][:length]
        message = torch.tensor(padded, dtype=torch.float64)
        if self._groups.control is not None:
            with self._naming_lost_mates(step):
                dist.broadcast(message, self._topology.mate(place), group=self._groups.control)
        return list(message.tolist())

    def give(self, thing: Any, place: int, step: int) -> Any:
        """Any object that one rank has, for everybody in the node; for rare moments."""
        if self._groups.control is None:
            return thing
        box = [thing]
        with self._naming_lost_mates(step):
            dist.broadcast_object_list(box, self._topology.mate(place), group=self._groups.control)
        return box[0]

    def _naming_lost_mates(self, step: int) -> AbstractContextManager[None]:
        return lost_contact_as(lambda _: lost_mates(self._topology, step))
