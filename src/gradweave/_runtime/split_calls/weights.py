"""Interfaces between the split calls of a forward and the weights that they use."""

from __future__ import annotations

from typing import Protocol

import torch

from gradweave._runtime.split_calls.autocast_cache import AutocastNotes
from gradweave._runtime.split_calls.task import Task


class GradientSink(Protocol):
    """The destination of the weight gradients of a call."""

    @property
    def layer(self) -> int:
        """Number of the layer, the same for all calls of one weight."""

    @property
    def may_outlive_backward(self) -> bool:
        """Whether tasks may be finished after the end of their backward."""

    def differentiable(self, weight: torch.Tensor, *, of_call: bool) -> torch.Tensor:
        """Return a weight for use in a backward that is itself differentiated.

        Args:
            weight: The weight as the call has used it.
            of_call: Whether gradients that reach the weight by this use are added to those of the call first, as they
                are where torch has transposed the weight for the call.
        """

    def add(self, task: Task) -> None:
        """Take the weight gradient of a call; called in backward."""


class CallWeights(Protocol):
    """A weight and its bias as one call, or several, use them."""

    @property
    def sink(self) -> GradientSink:
        """The destination of the calls' weight gradients."""

    def use(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias in a precision, for one more call."""


class ForwardWeights(Protocol):
    """The weights of the split calls of one forward.

    Attributes:
        autocast_notes: Notes on copies that several calls share.
    """

    autocast_notes: AutocastNotes

    def of_call(self, weight: torch.Tensor, bias: torch.Tensor | None) -> CallWeights | None:
        """Return what a call uses in place of a weight and its bias; None to leave the call as it is."""

    def has_stand_in(self, param: object) -> bool:
        """Return whether uses of a parameter outside of its layers' own calls take :meth:`stand_in`."""

    def stand_in(self, param: torch.Tensor) -> torch.Tensor:
        """Return what such a use takes in place of the parameter."""


class WeightCopies:
    """Stand-ins for a weight and its bias, and the copies of these in low precision.

    Where autocast casts a leaf once for all calls, the stand-in is cast once too: autograd then sums the gradients of
    these calls in low precision, and so must the split calls.

    Args:
        weight: Stand-in for the weight.
        bias: Stand-in for the bias, if there is one.
        is_leaf: Whether the weight itself is a leaf.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_leaf: bool) -> None:
        self.weight, self.bias = weight, bias
        self._is_leaf = is_leaf
        self._low_precision: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def stands_for(self, weight: torch.Tensor) -> bool:
        """Return whether a weight is still in the memory that the stand-in shares with it."""
        own = self.weight
        return own.data_ptr() == weight.data_ptr() and own.shape == weight.shape and own.stride() == weight.stride()

    def in_precision(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias in a precision."""
        if self.weight.dtype is dtype:
            return self.weight, self.bias
        if dtype in self._low_precision:
            return self._low_precision[dtype]
        low = self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        if self._is_leaf and torch.is_autocast_cache_enabled():
            self._low_precision[dtype] = low
        return low
