"""Process groups of a technique's own, and names in the default store that nothing else uses.

A technique talks in groups of its own, so that its messages are never mistaken for the user's, have a timeout of their
own, and can be ended, with their connections and threads, when the technique lets go.

torch names a group that all ranks make by a counter, and one that only its members make by how many groups these are
in. The second rule has two traps: members that are in different numbers of groups wait for each other under different
names, and a name comes again, with what is left under it in the store, once a group was ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradweave._compat.distributed import end_group, group_count
from gradweave.errors import GradweaveError, UnsupportedError


def new_group(
    families: Sequence[Sequence[int]],
    *,
    made_by_all: bool,
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> ProcessGroup:
    """Make process groups that do not overlap, and return this rank's.

    Args:
        families: Global ranks of each group, this rank among those of one.
        made_by_all: Whether all ranks of the job call this, and not only the members.
        timeout: None for torch's default.
        backend: None for the default group's.

    Raises:
        GradweaveError: If this rank is in none of them.
    """
    own: Any = None
    for ranks in families:
        # A group that all make is made by those outside of it too, or torch's counters of names would part.
        if made_by_all or dist.get_rank() in ranks:
            local = not made_by_all
            group = dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=local)
            own = group if dist.get_rank() in ranks else own
    if own is None:
        raise GradweaveError(f"rank {dist.get_rank()} is in none of the process groups {families}")
    return own  # type: ignore[no-any-return]


def check_group_counts(groups: Sequence[Any], *, technique: str) -> None:
    """Raise UnsupportedError, on all ranks, if ranks that are to make a group without the others count differently.

    torch would have them wait for each other until the timeout.

    Args:
        groups: Groups of this rank that together connect all ranks: one, or those of each dimension of a mesh.
        technique: What makes groups, as its user calls it.
    """
    counts = [group_count()]
    for group in groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, counts, group=group)
        counts = [count for others in gathered for count in others]
    if len(set(counts)) > 1:
        raise UnsupportedError(
            f"{technique} on some of the ranks",
            f"its ranks are in {', '.join(map(str, counts))} process groups, and torch names a new one by that number",
            "have all of these ranks make the same groups before",
        )


def close_connections(group: ProcessGroup) -> None:
    """End a group at once, whatever name torch gives to the next one: its members are to notice, and to fail too."""
    # The user may have ended all groups before, with destroy_process_group().
    with suppress(ValueError):
        dist.destroy_process_group(group)


def common_name(prefix: str, group: dist.ProcessGroup | None) -> str:
    """Return a name for keys in the default store that all ranks of a group have, and that was never used before."""
    box = [f"{prefix}-{uuid4().hex}"]
    dist.broadcast_object_list(box, dist.get_global_rank(group or dist.group.WORLD, 0), group=group)  # type: ignore[arg-type]
    return box[0]


__all__ = ["check_group_counts", "close_connections", "common_name", "end_group", "new_group"]
