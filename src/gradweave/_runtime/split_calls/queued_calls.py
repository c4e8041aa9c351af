"""Forwards whose linear and convolution calls leave their weight gradients in a queue."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from gradweave._compat.functions import in_function_transform, is_being_traced
from gradweave._runtime.split_calls.autocast_cache import autocast_dtype, is_cast_once
from gradweave._runtime.split_calls.gradient_node import GradientNode
from gradweave._runtime.split_calls.mode import CallSplitter
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.shared_nodes import NodeUse, SharedNodes, Weights


class QueuedCalls(CallSplitter):
    """A context in which linear and convolution calls leave their weight gradients in a queue.

    Args:
        queue: The queue.
        last: Weights and biases, by the number of their layer, whose gradients come after all input gradients. Those
            of other weights come in stock order.
        in_order: Layers of ``last`` whose gradients come in stock order nevertheless.
        nodes: Nodes that all forwards of a model share (default: nodes of this forward alone).
        numbers: Numbers of layers whose gradients come in stock order, by the ``id`` of their weight.
        next_number: Number of the first layer that has none yet (default: the least that is free).
    """

    def __init__(
        self,
        queue: WeightGradientQueue,
        last: Weights | None = None,
        in_order: Collection[int] = (),
        nodes: SharedNodes | None = None,
        *,
        numbers: Mapping[int, int] | None = None,
        next_number: int | None = None,
    ) -> None:
        last, known = last or {}, dict(numbers or {})
        for number, (weight, _) in last.items():
            known.setdefault(id(weight), number)
        if next_number is None:
            next_number = max((*last, *known.values()), default=-1) + 1
        super().__init__(_QueuedWeights(queue, last, in_order, nodes or SharedNodes(queue), known, next_number))


class _QueuedWeights:
    """The weights of one forward: some at nodes that forwards share, the others at nodes made at each call."""

    def __init__(
        self,
        queue: WeightGradientQueue,
        last: Weights,
        in_order: Collection[int],
        nodes: SharedNodes,
        numbers: dict[int, int],
        next_number: int,
    ) -> None:
        self.autocast_notes = nodes.autocast_notes
        self._queue = queue
        self._numbers = numbers
        self._next_number = next_number
        layers = {number: pair for number, pair in last.items() if number not in in_order and pair[0].requires_grad}
        # Under a function transform everything runs stock, and the transform would transform the nodes as well.
        needs_nodes = torch.is_grad_enabled() and not is_being_traced() and not in_function_transform()
        self._shared = nodes.of(layers) if needs_nodes else {}

    def has_stand_in(self, param: object) -> bool:
        """Return whether a parameter has a shared node."""
        shared = self._shared.get(id(param))
        return shared is not None and isinstance(param, torch.Tensor) and shared.has(param)

    def stand_in(self, param: torch.Tensor) -> torch.Tensor:
        """Return what stands for a parameter in a use whose gradient is computed where autograd comes to it."""
        return self._shared[id(param)].stand_in(param)

    def of_call(self, weight: torch.Tensor, bias: torch.Tensor | None) -> GradientNode | NodeUse:
        """Return the node of a weight and its bias: the shared one, if there is one, else one for this call.

        Calls that share autocast's copy of a weight have one node as well.
        """
        shared = self._shared.get(id(weight))
        if shared is not None and shared.has(weight, bias) and (use := shared.call(weight, bias)) is not None:
            return use
        if id(weight) not in self._numbers:
            self._numbers[id(weight)] = self._next_number
            self._next_number += 1
        node = GradientNode(self._numbers[id(weight)], weight, bias, self._queue)
        if autocast_dtype(weight) is weight.dtype or not is_cast_once(weight):
            return node
        notes = self.autocast_notes.of_context(weight.device)
        key = id(weight), id(bias)
        if key not in notes or not notes[key][0].stands_for(weight):
            notes[key] = node, weight, bias  # with the tensors, so that no others get their ids
        noted: GradientNode = notes[key][0]
        return noted
