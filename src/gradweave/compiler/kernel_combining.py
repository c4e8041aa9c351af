"""Small kernels of a compiled step that are combined into one.

A step ends in hundreds of updates of small tensors, and clipping in as many norms; with autocast it casts as many
weights: each is a kernel that takes no longer than its launch. Those that do not depend on each other can be one
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from graphlib import TopologicalSorter
from typing import Any, TypeVar

from gradweave._compat.tracing import elements_of, made_by_mixed_reductions, scheduled_before

SMALL = 1 << 18
"""Most elements of a kernel that is combined with others; larger ones fill a GPU by themselves."""
AT_MOST = 24
"""Most kernels in one; on an H200 this was faster than 8, and combining large ones much slower than not."""

Node = TypeVar("Node", bound=Hashable)


def groups_to_combine(
    nodes: Sequence[Node], needs: Callable[[Node], Sequence[Node]], kind: Callable[[Node], Hashable | None]
) -> list[list[Node]]:
    """Group nodes that are equally far from the end of the graph, and those that depend on nothing.

    Of two nodes at the same distance from the end, neither depends on the other, and groups of them still have an order
    of execution, from the farthest to the last. Distances from the start would do as well, but updates of different
    layers are at the same distance from the end only. Nodes that depend on nothing, such as casts of weights, can come
    before all others.

    Args:
        nodes: All nodes.
        needs: Returns the nodes that one depends on.
        kind: Returns a key that all nodes of a group share; None for a node that stays by itself.
    """
    needed_by_each = {node: needs(node) for node in nodes}
    distance = dict.fromkeys(nodes, 0)
    alike: dict[Hashable, list[Node]] = {}
    for node in reversed(list(TopologicalSorter(needed_by_each).static_order())):
        for needed in needed_by_each[node]:
            distance[needed] = max(distance[needed], distance[node] + 1)
        what = kind(node)
        if what is not None:
            place = distance[node] if needed_by_each[node] else None
            alike.setdefault((place, what), []).append(node)
    return [members[start : start + AT_MOST] for members in alike.values() for start in range(0, len(members), AT_MOST)]


def small_kernels(scheduler: Any) -> list[list[Any]]:
    """Return the kernels of Inductor's scheduler to combine: small ones, on one GPU."""
    unfit = made_by_mixed_reductions(scheduler)

    def kind(node: Any) -> Hashable | None:
        elements = elements_of(node)
        if elements is None or elements > SMALL or unfit & set(node.used_buffer_names()):
            return None
        device: Hashable = node.get_device()
        return device

    return groups_to_combine(scheduler.nodes, lambda node: scheduled_before(scheduler, node), kind)
