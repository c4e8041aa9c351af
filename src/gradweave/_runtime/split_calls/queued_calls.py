"""Forwards whose linear and convolution calls leave their weight gradients in a queue."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from gradweave._compat.eager import in_function_transform, is_being_traced
from gradweave._runtime.split_calls.autocast_cache import autocast_dtype, is_cast_once
from gradweave._runtime.split_calls.gradient_node import Tap
from gradweave._runtime.split_calls.mode import CallSplitter
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.shared_nodes import Call, SharedTaps

Weights = Mapping[int, tuple[torch.Tensor, torch.Tensor | None]]
"""Weights and biases by the number of their layer."""


class QueuedCalls(CallSplitter):
    """Context in which linear and convolution calls leave their weight gradients in a queue.

    Args:
        queue: Where they are left.
        first: Weights and biases whose gradients are to come after all input gradients, by the number of
            their layer; those of other weights come where they always did.
        in_order: The layers among these whose gradients come where they always did after all.
        taps: Of the model, for all of its forwards; without them, those of this one are its own.
        numbers: Of layers whose gradients come where they always did, by the ``id`` of their weight.
        next_number: Of the first layer that has none yet (default: the least that is free).
    """

    def __init__(
        self,
        queue: WeightGradientQueue,
        first: Weights | None = None,
        in_order: Collection[int] = (),
        taps: SharedTaps | None = None,
        *,
        numbers: Mapping[int, int] | None = None,
        next_number: int | None = None,
    ) -> None:
        first, known = first or {}, dict(numbers or {})
        for number, (weight, _) in first.items():
            known.setdefault(id(weight), number)
        if next_number is None:
            next_number = max((*first, *known.values()), default=-1) + 1
        super().__init__(_ForwardTaps(queue, first, in_order, taps or SharedTaps(queue), known, next_number))


class _ForwardTaps:
    """The taps of one forward: those that all forwards of the model share, and others, made at each call."""

    def __init__(
        self,
        queue: WeightGradientQueue,
        first: Weights,
        in_order: Collection[int],
        taps: SharedTaps,
        numbers: dict[int, int],
        next_number: int,
    ) -> None:
        self.casts = taps.casts
        self._queue = queue
        self._layers = numbers
        self._next = next_number
        own = {number: pair for number, pair in first.items() if number not in in_order and pair[0].requires_grad}
        # A function transform runs stock, and would want to transform the taps.
        may_tap = torch.is_grad_enabled() and not is_being_traced() and not in_function_transform()
        self._shared = taps.of(own) if may_tap else {}

    def has(self, param: object) -> bool:
        """Return whether a parameter is one that shared taps stand for."""
        shared = self._shared.get(id(param))
        return shared is not None and isinstance(param, torch.Tensor) and shared.has(param)

    def whole(self, param: torch.Tensor) -> torch.Tensor:
        """Return what stands for a parameter in a use whose gradient is computed where autograd comes to it."""
        return self._shared[id(param)].whole(param)

    def tap(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Tap | Call:
        """Return the tap of a weight and a bias: one for all calls where their gradients come last, else one for each.

        Where autocast casts a weight once for several calls, these have one as well.
        """
        shared = self._shared.get(id(weight))
        if shared is not None and shared.has(weight, bias) and (call := shared.call(weight, bias)) is not None:
            return call
        if id(weight) not in self._layers:
            self._layers[id(weight)] = self._next
            self._next += 1
        made = Tap(self._layers[id(weight)], weight, bias, self._queue)
        if autocast_dtype(weight) is weight.dtype or not is_cast_once(weight):
            return made
        kept = self.casts.kept(weight.device)
        key = id(weight), id(bias)
        if key not in kept or not kept[key][0].stands_for(weight):
            kept[key] = made, weight, bias
        tap: Tap = kept[key][0]
        return tap
