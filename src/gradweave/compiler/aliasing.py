"""Tensors that share memory, or are one tensor: a graph that is right for each by itself may be wrong for both.

A tracer is given a fake tensor for each, without common memory, so that a write to one is not seen in the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from gradweave._compat.tensors import memory_of

AliasGroup = list[tuple[int, int]]
"""Tensors that share memory: the number of each, and where in the memory it begins."""


class Aliasing:
    """The way in which some tensors share memory.

    Args:
        tensors: As a graph was made for them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._addresses = [x.data_ptr() for x in tensors]
        self._groups = alias_groups(tensors)
        self._memories = _memories(tensors)

    def holds_for(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the tensors that are now in their places share memory in the same way."""
        addresses = [x.data_ptr() for x in tensors]
        if addresses != self._addresses:  # cheaper to compare than the groups, and nearly always equal
            if alias_groups(tensors) != self._groups:
                return False
            self._addresses, self._memories = addresses, _memories(tensors)
        return True

    def meets(self, batch: Sequence[Any]) -> bool:
        """Return whether a tensor of a batch lies in the memory of one of the tensors."""
        return not self._memories.isdisjoint(_memories(batch))


def _memories(values: Sequence[Any]) -> set[int]:
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    return {memory_of(x) for x in tensors if x.layout is torch.strided and x.numel()}


def alias_groups(tensors: Sequence[torch.Tensor]) -> list[AliasGroup]:
    """Return the groups of tensors that share memory."""
    by_memory: dict[int, AliasGroup] = defaultdict(list)
    for index, x in enumerate(tensors):
        if x.layout is torch.strided and x.numel():
            by_memory[memory_of(x)].append((index, int(x.storage_offset())))
    return [members for members in by_memory.values() if len(members) > 1]


def has_aliases(inputs: Sequence[Any], batch: Sequence[Any]) -> bool:
    """Return whether weights, buffers or state share memory; tensors of a batch may, among themselves."""
    passing = set(map(id, batch))
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return any(any(id(tensors[index]) not in passing for index, _ in group) for group in alias_groups(tensors))


def repeated_inputs(inputs: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Return the inputs that are the same tensor as an earlier one, each with the first such."""
    first: dict[int, int] = {}
    return tuple(
        (index, first[id(x)])
        for index, x in enumerate(inputs)
        if isinstance(x, torch.Tensor) and first.setdefault(id(x), index) != index
    )


def merge_inputs(forward: GraphModule, repeated: Sequence[tuple[int, int]]) -> GraphModule:
    """Return a forward that reads a repeated input in the place of its first occurrence."""
    if not repeated:
        return forward
    graph = Graph()
    graph.output(graph.graph_copy(forward.graph, {}))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for index, earlier in repeated:
        inputs[index].replace_all_uses_with(inputs[earlier])
    return GraphModule(forward, graph)


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor that almost surely differs once the tensor has been changed."""
    with torch.no_grad():
        sums = [_sum_of_bits(x.detach()) for x in tensors if x.layout is torch.strided and x.numel()]
    return [int(x) for x in sums]


def _sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(x) if x.is_complex() else x
    if real.dtype is torch.bool or not real.is_floating_point():
        return real.sum(dtype=torch.int64)
    # As integers of the same width: sums of floats would lose small changes, and be nan for good once one element is.
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return real.view(widths[real.element_size()]).sum(dtype=torch.int64)
