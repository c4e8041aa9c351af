"""Forwards whose backward computes some weight gradients apart from the chain of input gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradweave._compat.eager import no_torch_function
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

    Of the nodes that are ready, autograd runs the one made last: so the weights are tapped before the
    forward begins, last layer first. That touches no weight: one whose update is pending stays so until
    its layer comes to it. All other layers run stock.

    Args:
        queue: Where weight gradients wait.
        layers: Those that are held back, in the order of the forward, by number.
        resolve: Brings a weight up to date whose update is pending.
    """

    def __init__(
        self, queue: WeightGradientQueue, layers: Mapping[int, nn.Module], resolve: Callable[[nn.Parameter], None]
    ) -> None:
        weights: dict[int, Any] = {n: (layers[n].weight, layers[n].bias) for n in sorted(layers, reverse=True)}
        self._resolve = resolve
        self._held = {id(weight) for weight, _ in weights.values()}
        with no_torch_function():
            super().__init__(queue, weights)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As torch calls it; weights are brought up to date where they are used."""
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


class Watched(QueuedCalls):
    """Context of a forward whose weight gradients come where they always do, each as a task of its layer.

    Args:
        queue: Where they are computed.
        layers: Of the model, in the order of the forward.
    """

    def __init__(self, queue: WeightGradientQueue, layers: Sequence[Layer]) -> None:
        own = [(number, layer.module.weight) for number, layer in enumerate(layers) if layer.can_wait]
        numbers = {id(weight): number for number, weight in own if isinstance(weight, torch.Tensor)}
        super().__init__(queue, numbers=numbers, next_number=len(layers))
