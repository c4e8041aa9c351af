"""The ranks of a pipeline: their process group, and the store in which each finds why another one stopped."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from gradweave._compat.distributed import group_count, part_of_default_store
from gradweave._runtime.peers.contact import in_a_line, is_lost_contact
from gradweave._runtime.peers.groups import check_group_counts, close_connections, new_group
from gradweave._runtime.peers.same_on_ranks import refuse_together
from gradweave.errors import ArgumentError, LostPeerError

T = TypeVar("T")

_PATIENCE = 2.0
"""Seconds for which a rank that lost contact looks for another one's reason, or waits for others to close."""


class PipelinePeers:
    """The ranks of one pipeline.

    The group is not the user's: a rank that fails leaves it, which closes its connections, so that ranks that wait for
    a message of it fail too, at once, and leave in turn. A message cannot say why; the store can: a rank that fails
    writes its reason there before it leaves, and one that lost contact looks for it there.

    Args:
        group: The ranks; None for all.
        timeout: Seconds after which waiting for another rank is an error; None for torch's default.

    Attributes:
        problem: The error about a wrong timeout: other ranks must hear of it, in a group that must be made first.
    """

    def __init__(self, group: Any, timeout: float | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError("group", group, "call torch.distributed.init_process_group() first, as under torchrun")
        self.problem: ArgumentError | None = None
        try:
            limit = _limit(timeout)
        except ArgumentError as problem:
            self.problem, limit = problem, None
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._are_all = len(self._ranks) == dist.get_world_size()
        if not self._are_all:
            check_group_counts([group], technique="a pipeline")
        self.group: Any = new_group([self._ranks], made_by_all=self._are_all, timeout=limit)
        self._count = group_count()
        # Another connection than the default store's: a rank that waits there would hold up torch's own use of it.
        self._store: Any = part_of_default_store(f"gradweave-pipeline-{self.group.group_name}")

    def from_first(self, value: T) -> T:
        """Return the first rank's value, on all ranks."""
        box = [value]
        dist.broadcast_object_list(box, self.global_rank(0), group=self.group)
        return box[0]

    def refuse(self, problem: Exception | None) -> None:
        """Raise on all ranks what any of them has found wrong; all ranks call it."""
        refuse_together(problem, self.group, technique="the pipeline")

    def note(self, key: str, text: str = "") -> None:
        """Leave a note for the other ranks, without waiting for them."""
        self._store.set(key, text)

    def all_refuse(self, step: int, reason: str) -> bool:
        """Return whether all ranks refuse a step: nothing of it has been sent then, and the pipeline can go on."""
        self.note(f"refused-{step}-{self.rank}", reason)
        keys = [f"refused-{step}-{rank}" for rank in range(self.size)]
        return not self.missing(keys, timedelta(seconds=_PATIENCE))

    def refusal(self, step: int) -> str | None:
        """Return why another rank refuses a step, if it does so within a while."""
        ends = time.monotonic() + _PATIENCE / 2
        while time.monotonic() < ends:
            for rank in range(self.size):
                if self._store.check([f"refused-{step}-{rank}"]):
                    return str(self._store.get(f"refused-{step}-{rank}").decode())
            time.sleep(0.02)
        return None

    def missing(self, keys: Sequence[str], patience: timedelta) -> list[int]:
        """Return the numbers of the notes that are not there after a while."""
        try:
            self._store.wait(list(keys), patience)
        except RuntimeError:
            return [number for number, key in enumerate(keys) if not self._store.check([key])]
        return []

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank of the pipeline."""
        return self._ranks[rank]

    def leave(self, error: BaseException) -> None:
        """End this rank's part after an error, and let go of all that waits on the network.

        Raises:
            LostPeerError: If another rank is at fault; else the error is the caller's to raise.
        """
        culprit: int | None = self.rank
        reason = f"rank {self.rank} failed with {in_a_line(error)}"
        lost = is_lost_contact(error)
        if lost:
            culprit, reason = self._first_failure() or (None, f"contact with a rank was lost ({in_a_line(error)})")
        with suppress(RuntimeError):  # the rank that hosts the store may be gone
            self._store.set(f"failure-{self.rank}", json.dumps((culprit, reason)))
        # Connections close only when nothing holds the group: not even the frames of the error.
        _empty_frames(error)
        self._close_connections()
        if lost:
            raise LostPeerError(
                f"the pipeline has stopped: {reason}; weights are those of the last optimizer step: restart from a "
                "checkpoint",
                ranks=() if culprit is None else (self.global_rank(culprit),),
            ) from None

    def close(self) -> None:
        """End this rank's part in peace; connections are freed if all ranks do so, as others may still use them.

        All ranks come to the same verdict, so that all stay in the same number of groups. A group of some ranks
        is kept, and so is one after which others were made: torch names groups by how many there are, and would
        give the next one a name that is taken, or known to the store.
        """
        with suppress(RuntimeError):  # the rank that hosts the store may be gone
            if self.group is not None and self._all_close():
                self._close_connections()
        self.group = self._store = None

    def _close_connections(self) -> None:
        if self.group is not None:
            close_connections(self.group)
            self.group = None

    def _all_close(self) -> bool:
        """Return whether all ranks have called this and none objects or has lost patience; all find the same.

        The first verdict written holds, for ranks that come later too.
        """
        if not self._are_all or group_count() != self._count:
            self._store.compare_set("verdict", "", "keep")
            return False
        if self._store.add("closed", 1) == self.size:
            return bool(self._store.compare_set("verdict", "", "free") == b"free")
        ends = time.monotonic() + _PATIENCE
        while time.monotonic() < ends:
            if self._store.check(["verdict"]):
                return bool(self._store.get("verdict") == b"free")
            time.sleep(0.01)
        return bool(self._store.compare_set("verdict", "", "keep") == b"free")

    def _first_failure(self) -> tuple[int | None, str] | None:
        """Return the rank that failed first and why, if it said so; ranks that only lost contact pass that on."""
        ends = time.monotonic() + _PATIENCE
        while time.monotonic() < ends:
            try:
                for rank in range(self.size):
                    if self._store.check([f"failure-{rank}"]):
                        culprit, reason = json.loads(self._store.get(f"failure-{rank}"))
                        return culprit, reason
            except RuntimeError:
                return None, "the rank that hosts the store is gone"
            time.sleep(0.05)
        return None


def _empty_frames(error: BaseException) -> None:
    """Let go of what a failed run has on the network, even while its error is kept, as by a debugger or a test.

    An error's traceback keeps the frames of torch's schedule, and these the messages under way and their group. To
    clear a frame is not enough: variables that the schedule shares with its nested functions live on in those
    functions. So messages are taken out of the lists and dicts that hold them first.
    """
    chained: BaseException | None = error
    while chained is not None:
        frames = [frame for frame, _ in traceback.walk_tb(chained.__traceback__)]
        frames = [frame for frame in frames if frame.f_globals.get("__name__") == schedules.__name__]
        for frame in frames:
            for value in list(frame.f_locals.values()):
                if isinstance(value, (dict, list)):
                    value.clear()
        traceback.clear_frames(chained.__traceback__)
        for frame in frames:
            _ = frame.f_locals  # before Python 3.13, a copy that the frame keeps: this renews it
        chained = chained.__cause__ or chained.__context__


def _limit(timeout: Any) -> timedelta | None:
    """Return a timeout as torch takes it; raise ArgumentError for what is none."""
    if timeout is None:
        return None
    try:
        if timeout > 0:
            return timedelta(seconds=timeout)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ArgumentError("timeout", timeout, "give a positive number of seconds, or None")
