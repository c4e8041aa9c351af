"""Passes that change where and when an operation of a traced step runs, never what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradweave.step_graph.nodes import changed_by, has_data_dependent_size, memories_of, phase_of


def updates_at_their_gradients(graph: GraphModule) -> None:
    """Move each operation of the update to the first place where its inputs exist.

    A gradient's memory is then freed while backward goes on. An operation that changes a tensor stays after everything
    that reads the tensor as it was, and all of them after forward, which a batch may make fail, and after all messages
    of other ranks, which may be lost: nothing has changed then.
    """
    nodes = list(graph.graph.nodes)
    update = {node for node in nodes if node.op == "call_function" and phase_of(node) == "update"}
    place = {node: index for index, node in enumerate(nodes)}
    may_fail_until = max((place[node] for node in nodes if phase_of(node) in ("forward", "communication")), default=0)
    # By memory and not by node, because views of a tensor are nodes of their own: the last place where it is read or
    # written by operations that stay, and by updates in the places that they are moved to.
    read_until: dict[int, int] = {}
    used_by_updates: dict[int, int] = {}
    written: dict[int, int] = {}
    earliest: dict[Node, int] = {}
    for node in nodes:
        memories = memories_of((node, *node.all_input_nodes))
        changed = memories_of(changed_by(node))
        if node not in update:
            read_until.update(dict.fromkeys(memories, place[node]))
            written.update(dict.fromkeys(changed, place[node]))
            continue
        when = max((earliest.get(n, place[n]) for n in node.all_input_nodes), default=place[node])
        when = max([when, may_fail_until, *(written.get(memory, 0) for memory in memories)])
        for memory in changed:
            when = max(when, read_until.get(memory, 0), used_by_updates.get(memory, 0))
        written.update(dict.fromkeys(changed, when))
        for memory in memories:
            used_by_updates[memory] = max(used_by_updates.get(memory, 0), when)
        earliest[node] = when
    for node in reversed(nodes):  # so that updates that are moved to one place stay in their order
        if node in update and earliest[node] < place[node]:
            nodes[earliest[node]].append(node)
    graph.graph.lint()
    graph.recompile()


def has_data_dependent_sizes(graph: GraphModule) -> bool:
    """Return whether a result's size depends on values, so that each step has sizes of its own."""
    return any(_has_data_dependent_size(node) for node in graph.graph.nodes)


def _has_data_dependent_size(node: Node) -> bool:
    given: Sequence[Any] = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else ()
    return has_data_dependent_size(node.target, [x.meta.get("val") for x in given if isinstance(x, Node)])


def draws_in_update(graph: GraphModule) -> bool:
    """Return whether an update draws random numbers, so that the order of updates can be seen."""
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        for node in graph.graph.nodes
        if node.op == "call_function" and phase_of(node) == "update"
    )


def take_out_counters(graph: GraphModule, inputs: int) -> list[int]:
    """Remove 0-dimensional inputs that the step only adds 1 to, such as BatchNorm's counts of batches.

    In a compiled graph each would be a launch of its own; together they are one.

    Args:
        graph: Of operations; changed.
        inputs: Number of its inputs to look at.

    Returns:
        Positions of the inputs that the graph no longer adds to, and no longer reads.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"][:inputs]
    counters = [index for index, node in enumerate(placeholders) if _is_counter(node)]
    for index in counters:
        graph.graph.erase_node(next(iter(placeholders[index].users)))
    graph.recompile()
    return counters


def _is_counter(node: Node) -> bool:
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() > 0 or value.dtype is not torch.int64:
        return False
    users: Sequence[Node] = list(node.users)
    if len(users) != 1 or users[0].users:
        return False
    return users[0].target is torch.ops.aten.add_.Tensor and users[0].args == (node, 1) and not users[0].kwargs
