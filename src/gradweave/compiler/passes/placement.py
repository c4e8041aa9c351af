"""Rewrites of a traced step that change where and when something is done, never what."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gradweave._compat.eager import memory_of
from gradweave.compiler.trace import changed_by, phase_of


def updates_at_their_gradients(graph: GraphModule) -> None:
    """Moves each operation of the update to the first place where what it needs is there.

    A gradient is then used up, and its memory free, while backward goes on. An operation that
    changes a tensor stays behind everything that reads the tensor as it was, and all of them behind
    forward, which a batch may make fail: nothing has changed then.
    """
    nodes = list(graph.graph.nodes)
    update = {node for node in nodes if node.op == "call_function" and phase_of(node) == "update"}
    place = {node: index for index, node in enumerate(nodes)}
    read_until: dict[int, int] = {}
    touched: dict[int, int] = {}
    written: dict[int, int] = {}
    earliest: dict[Node, int] = {}
    forward = max((place[node] for node in nodes if phase_of(node) == "forward"), default=0)
    for node in nodes:
        memories = {memory for n in (node, *node.all_input_nodes) if (memory := _memory(n)) is not None}
        changed = {memory for n in changed_by(node) if (memory := _memory(n)) is not None}
        if node not in update:
            read_until.update(dict.fromkeys(memories, place[node]))
            written.update(dict.fromkeys(changed, place[node]))
            continue
        when = max((earliest.get(n, place[n]) for n in node.all_input_nodes), default=place[node])
        when = max([when, forward, *(written.get(memory, 0) for memory in memories)])
        for memory in changed:
            when = max(when, read_until.get(memory, 0), touched.get(memory, 0))
        written.update(dict.fromkeys(changed, when))
        for memory in memories:
            touched[memory] = max(touched.get(memory, 0), when)
        earliest[node] = when
    for node in reversed(nodes):
        if node in update and earliest[node] < place[node]:
            nodes[earliest[node]].append(node)
    graph.graph.lint()
    graph.recompile()


def has_sizes_of_values(graph: GraphModule) -> bool:
    """Whether a result's size depends on the values it is computed from, so that each step has sizes of its own."""
    return any(_has_size_of_values(node) for node in graph.graph.nodes)


def _has_size_of_values(node: Node) -> bool:
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    if node.target is not torch.ops.aten.index.Tensor:
        return True
    # Torch tags indexing as a whole; only masks pick as many elements as their values say.
    indices = [x.meta.get("val") for x in node.args[1] if isinstance(x, Node)]  # type: ignore[union-attr]
    return any(x is None or x.dtype in (torch.bool, torch.uint8) for x in indices)


def draws_in_update(graph: GraphModule) -> bool:
    """Whether an update draws random numbers, so that the order of updates can be seen."""
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        for node in graph.graph.nodes
        if node.op == "call_function" and phase_of(node) == "update"
    )


def split_convolutions(graph: GraphModule) -> None:
    """Makes two operations of a convolution's backward: one for its input, and one for its weight and bias.

    Only the first is what the layer below waits for.
    """
    split_convolutions_of(graph.graph)
    graph.recompile()


def split_convolutions_of(graph: Graph) -> None:
    """As :func:`split_convolutions`, of a graph that is no module's."""
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.convolution_backward.default or node.kwargs:
            continue
        *arguments, (wants_input, wants_weight, wants_bias) = node.args
        if not (wants_input and (wants_weight or wants_bias)) or any(user.target is not getitem for user in node.users):
            continue
        with graph.inserting_before(node):
            of_weight, of_input = (
                graph.call_function(node.target, (*arguments, mask))
                for mask in ([False, wants_weight, wants_bias], [True, False, False])
            )
        of_weight.meta, of_input.meta = dict(node.meta), dict(node.meta)
        for user in list(node.users):
            user.replace_input_with(node, of_input if user.args[1] == 0 else of_weight)
        graph.erase_node(node)


def _memory(node: Node) -> int | None:
    """What names the memory behind a node's value, the same for all views of it."""
    value = node.meta.get("val")
    return memory_of(value) if isinstance(value, torch.Tensor) else None


def take_out_counters(graph: GraphModule, inputs: int) -> list[int]:
    """Removes inputs of no dimension that the step only adds 1 to, such as BatchNorm's counts of batches.

    As part of a compiled graph each would be a launch of its own; together they are one.

    Args:
        graph: Of operations; changed.
        inputs: How many of its inputs to look at.

    Returns:
        The inputs that the graph no longer adds to, and no longer reads.
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
