"""The rule that puts layers together into buckets: messages of gradients, and updates.

The simulator's messages and those that ``DataParallel`` sends are made by this rule, of whole layers, so that the
simulated step is the step that runs. ``fuse`` fills its buckets by it too, of single parameters, each of which has an
update of its own. The rule knows no tensors: the items and their sizes are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def readiness(layers: Sequence[T], k: int = 0) -> tuple[list[T], list[T]]:
    """Return layers in the order in which backward computes their weight gradients, as two runs.

    The first run is that of backward, from the last layer to layer ``k``. The second is that of the
    first ``k`` layers, held back to the end of backward and then computed in the order of the forward.
    """
    return list(reversed(layers[k:])), list(layers[:k])


def fill(run: Iterable[T], size: Callable[[T], int], limit: int) -> list[list[T]]:
    """Put the layers of a run into buckets, in their order, each filled up to ``limit`` bytes.

    An item is never divided: the gradients of a layer, for example, are ready together and needed together. So a bucket
    may hold more than ``limit``, by less than its last layer. With a limit of 0 each layer has a
    bucket of its own.
    """
    buckets: list[list[T]] = []
    room = 0
    for layer in run:
        if not buckets or room <= 0:
            buckets.append([])
            room = limit
        buckets[-1].append(layer)
        room -= size(layer)
    return buckets


def message_buckets(layers: Sequence[T], k: int, size: Callable[[T], int], limit: int) -> list[list[T]]:
    """Return the layers of each message of reverse first-k, in the order of sending; k=0 is plain backward.

    No message has layers of both runs: the layers that are held back are those that the next forward
    needs first, and must neither make the message of another layer wait nor travel after its bytes.
    """
    return [bucket for run in readiness(layers, k) for bucket in fill(run, size, limit)]
