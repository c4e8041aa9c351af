"""Forwards whose backward computes some weight gradients apart from the chain of input gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradweave._compat.functions import no_torch_function
from gradweave._runtime.split_calls.queue import WeightGradientQueue
from gradweave._runtime.split_calls.queued_calls import QueuedCalls
from gradweave.parallel.data_parallel.layers import Layer

_WITH_WEIGHTS = {
    functional.linear, functional.conv1d, functional.conv2d, functional.conv3d,
    functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d,
    functional.multi_head_attention_forward,
}  # fmt: skip


class HeldBack(QueuedCalls):
    """Context of a forward whose backward computes the weight gradients of some layers last, first layer first.

    All other layers run stock.

    Args:
        queue: Where weight gradients wait.
        layers: The layers to hold back, in the order of the forward, by number.
        resolve: Brings a weight up to date whose update is pending.
    """

    def __init__(
        self, queue: WeightGradientQueue, layers: Mapping[int, nn.Module], resolve: Callable[[nn.Parameter], None]
    ) -> None:
        # Of the nodes that are ready, autograd runs the one made last. So nodes that are made before the forward begins
        # run after the chain of input gradients, and those made last layer first run first layer first.
        weights: dict[int, Any] = {n: (layers[n].weight, layers[n].bias) for n in sorted(layers, reverse=True)}
        self._resolve = resolve
        self._held = {id(weight) for weight, _ in weights.values()}
        # Making a node touches no weight: one whose update is pending stays so until the forward comes to its layer.
        with no_torch_function():
            super().__init__(queue, weights)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one of torch's functions; bring the weights that it uses up to date first."""
        kwargs = kwargs or {}
        if func not in _WITH_WEIGHTS:
            return func(*args, **kwargs)
        given = (*args, *kwargs.values())
        for argument in given:
            if isinstance(argument, nn.Parameter):
                self._resolve(argument)
        if not any(id(argument) in self._held for argument in given):
            return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def calls_by_layer(queue: WeightGradientQueue, layers: Sequence[Layer]) -> QueuedCalls:
    """Return the context of a forward whose weight gradients come in stock order, each as a task of its layer.

    Args:
        queue: Where they are computed.
        layers: The layers of the model, in the order of the forward.
    """
    own = [(number, layer.module.weight) for number, layer in enumerate(layers) if layer.can_wait]
    numbers = {id(weight): number for number, weight in own if isinstance(weight, torch.Tensor)}
    return QueuedCalls(queue, numbers=numbers, next_number=len(layers))
