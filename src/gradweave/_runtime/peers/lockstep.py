"""Changes that all ranks must make at the same step, agreed on before a message of a group could be misunderstood."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradweave._compat.distributed import part_of_default_store
from gradweave._runtime.replicas import ReplicaError


class Changes:
    """Counts changes of this rank, and waits until all others have made them too.

    Ranks agree through the store, not by a message of a group: ranks that have not changed are about to send other
    messages there, and where two of different sizes meet, Gloo ends the process.

    Args:
        name: Prefix of the keys in the store, the same on all ranks, and used for nothing else.
        technique: What changes, as its user calls it.
        timeout: Seconds to wait for the others; None for the store's own.
    """

    def __init__(self, name: str, *, technique: str, timeout: float | None) -> None:
        self._name = name
        self._technique = technique
        self._timeout = timeout
        self._count = 0
        self._store: Any = None

    def agree(self, what: str, now: str, ranks: Sequence[int]) -> None:
        """Wait for the others; raise ReplicaError if one does not come in time, or comes with something else.

        Args:
            what: Subject and verb of the change, for messages.
            now: The state after the change, as text; the same on all ranks.
            ranks: Global ranks that must make the change, this one among them.
        """
        if self._store is None:
            # Only now, with a connection of its own: most trainings never change, and on a connection that is shared a
            # wait would hold up every other user of the store.
            self._store = part_of_default_store(self._name)
        key, self._count = f"{self._count}", self._count + 1
        self._store.set(f"{key}/{dist.get_rank()}", now)
        keys = {rank: f"{key}/{rank}" for rank in ranks}
        try:
            waiting = () if self._timeout is None else (timedelta(seconds=self._timeout),)
            self._store.wait(list(keys.values()), *waiting)
        except RuntimeError as error:
            raise self._apart(what, [rank for rank in ranks if not self._has_come(keys[rank])]) from error
        others = [rank for rank in ranks if self._store.get(keys[rank]).decode() != now]
        if others:
            raise self._apart(what, others)

    def _has_come(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False

    def _apart(self, what: str, others: Sequence[int]) -> ReplicaError:
        where = f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}"
        return ReplicaError(
            f"{self._technique}: {what} on rank {dist.get_rank()}, and not so on {where}; do the same at the same step "
            "on all ranks, and start again from a checkpoint"
        )
