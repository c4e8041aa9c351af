"""How much of a device tasks leave to others: fitted to how long pairs of them take beside each other.

The scheduler's model has a share of the device for every task; two tasks run beside each other at full speed
while their shares sum to at most 1, and slow down together beyond that. So a pair's slowdown is the sum of
its shares, or 1, and measured slowdowns give the shares.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

_SHARES = [number / 50 for number in range(51)]
_SWEEPS = 40
_Task = TypeVar("_Task", bound=Hashable)


def slowdown(one: float, other: float, together: float) -> float:
    """By what factor two tasks slow each other down while both run: from 1, not at all, to 2, no gain.

    Args:
        one: Seconds of the first alone.
        other: Seconds of the second alone.
        together: Seconds until both are done, begun at once.
    """
    shorter, longer = sorted((one, other))
    if shorter <= 0:
        return 2.0
    return min(2.0, max(1.0, (together - (longer - shorter)) / shorter))


def fit_shares(slowdowns: Mapping[tuple[_Task, _Task], float]) -> dict[_Task, float]:
    """A share for every task in the pairs, so that the slowdowns come out as near as possible.

    Where several shares would do, it is the largest: no overlap is promised that was not seen.
    """
    partners: dict[_Task, list[tuple[_Task, float]]] = {}
    for (one, other), factor in slowdowns.items():
        partners.setdefault(one, []).append((other, factor))
        partners.setdefault(other, []).append((one, factor))
    shares = dict.fromkeys(partners, 1.0)
    for _ in range(_SWEEPS):
        before = dict(shares)
        for task, known in partners.items():
            shares[task] = min(_SHARES, key=lambda share: (_error(share, known, shares), -share))
        if shares == before:
            break
    return shares


def _error(share: float, known: Sequence[tuple[_Task, float]], shares: Mapping[_Task, float]) -> float:
    """Rounded, so that what differs by nothing is a tie."""
    return round(sum((max(1.0, share + shares[other]) - factor) ** 2 for other, factor in known), 9)


def equal_groups(seconds: Sequence[float], most: int) -> list[range]:
    """Neighbours put together into groups of about the same time."""
    total = sum(seconds)
    groups: list[range] = []
    begin, spent = 0, 0.0
    for index, one in enumerate(seconds):
        spent += one
        is_full = spent >= total * (len(groups) + 1) / most
        if is_full or index + 1 == len(seconds):
            groups.append(range(begin, index + 1))
            begin = index + 1
    return groups
