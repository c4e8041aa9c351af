"""The ranks of a pipeline: a process group of their own, and how each learns why another one stopped."""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradweave.compat.distributed import group_count, part_of_default_store
from gradweave.errors import ArgumentError, GradweaveError

_PATIENCE = 2.0
"""Seconds in which a rank that lost contact looks for another one's reason."""
_LOST = ("gloo", "connection", "timed out", "timeout", "nccl", "broken pipe", "reset by peer")


class Together:
    """The ranks of one pipeline.

    The group is not the user's: a rank that fails leaves it, which closes its connections, so that those who
    wait for it fail too, at once, leave it in turn, and find its reason in the store.

    Args:
        group: The ranks; None for all.
        timeout: Seconds after which waiting for another rank is an error; None for torch's default.
    """

    def __init__(self, group: Any, timeout: float | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError("group", group, "call torch.distributed.init_process_group() first, as under torchrun")
        if timeout is not None and timeout <= 0:
            raise ArgumentError("timeout", timeout, "give a positive number of seconds")
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        everybody = len(self._ranks) == dist.get_world_size()
        if not everybody:
            _check_counts(group, self.size)
        self.group: Any = dist.new_group(
            self._ranks,
            timeout=None if timeout is None else timedelta(seconds=timeout),
            use_local_synchronization=not everybody,
        )
        self._store = part_of_default_store(f"gradweave-pipeline-{self.group.group_name}")

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def global_rank(self, rank: int) -> int:
        """What torch calls a rank of the pipeline."""
        return self._ranks[rank]

    def leave(self, error: BaseException) -> None:
        """Ends this rank's part after an error, and lets go of all that waits on the network.

        Raises:
            GradweaveError: If another rank is at fault; else, the error is the caller's to raise.
        """
        lost = _is_lost_contact(error)
        if lost:
            reason = self._reason() or f"contact with another rank was lost ({_short(error)})"
        else:
            reason = f"rank {self.rank} failed with {_short(error)}"
        with suppress(RuntimeError, dist.DistError):  # the rank that hosts the store may be gone
            self._store.set(f"failure-{self.rank}", reason)
        chained: BaseException | None = error
        while chained is not None:
            traceback.clear_frames(chained.__traceback__)
            chained = chained.__cause__ or chained.__context__
        if self.group is not None:
            group, self.group = self.group, None
            dist.destroy_process_group(group)
        if lost:
            raise GradweaveError(
                f"the pipeline has stopped: {reason}; weights are those of the last optimizer step: restart from a "
                "checkpoint"
            ) from None

    def close(self) -> None:
        """Ends this rank's part in peace; connections last as long as the process, as others may still use them."""
        self.group = None

    def _reason(self) -> str | None:
        """Why another rank has stopped, if it said so."""
        ends = time.monotonic() + _PATIENCE
        while time.monotonic() < ends:
            try:
                for rank in range(self.size):
                    if self._store.check([f"failure-{rank}"]):
                        return str(self._store.get(f"failure-{rank}").decode())
            except (RuntimeError, dist.DistError):
                return "the rank that hosts the store is gone"
            time.sleep(0.05)
        return None


def _check_counts(group: Any, size: int) -> None:
    """A group of some ranks is named by how many groups they have made: torch would wait for ever if these differ."""
    counts: list[Any] = [None] * size
    dist.all_gather_object(counts, group_count(), group=group)
    if len(set(counts)) > 1:
        raise ArgumentError("process_group", f"ranks in {counts} groups", "have all of its ranks make the same groups")


def _is_lost_contact(error: BaseException) -> bool:
    if isinstance(error, GradweaveError) or not isinstance(error, (RuntimeError, dist.DistError)):
        return False
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _LOST)


def _short(error: BaseException) -> str:
    """What happened, in a line: the cause behind all others."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line if len(line) <= 300 else f"{line[:300]} ..."
