"""What stands between the weights of layers and the calls that use them."""

from __future__ import annotations

from typing import Protocol

import torch

from gradweave._runtime.split_calls.autocast_cache import Casts
from gradweave._runtime.split_calls.task import Task


class Pending(Protocol):
    """Where the backward of a call leaves its weight gradient."""

    @property
    def layer(self) -> int:
        """Number of the layer; all calls of one weight have the same."""

    @property
    def may_outlive(self) -> bool:
        """Whether tasks may be finished after the end of their backward."""

    def in_derivatives(self, weight: torch.Tensor, *, of_call: bool) -> torch.Tensor:
        """Return the weight as a backward uses it that is itself differentiated."""

    def leave(self, task: Task) -> None:
        """Take the weight gradient of a call; called in backward."""


class Tap(Protocol):
    """A weight and its bias as one call, or several, use them."""

    @property
    def pending(self) -> Pending:
        """Where calls leave their weight gradients."""

    def used_as(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias in a precision, for one more call."""


class Taps(Protocol):
    """The taps of one forward.

    Attributes:
        casts: What autocast casts once for several calls.
    """

    casts: Casts

    def tap(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Tap | None:
        """Return what a call uses in place of a weight and its bias; None to leave the call as it is."""

    def has(self, param: object) -> bool:
        """Return whether uses of a parameter outside of its layers' own calls go through :meth:`whole`."""

    def whole(self, param: torch.Tensor) -> torch.Tensor:
        """Return what such a use takes in place of the parameter."""


class WeightCopies:
    """Stand-ins for a weight and its bias, and their copies in low precision.

    Where autocast would cast a leaf once for all calls, so is the stand-in: autograd sums the gradients of these calls
    up in low precision then, and the sum must be the same.

    Args:
        weight: Stands for the weight.
        bias: Stands for the bias, if there is one.
        is_leaf: Whether the weight itself is a leaf.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_leaf: bool) -> None:
        self.weight, self.bias = weight, bias
        self._is_leaf = is_leaf
        self._low: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def stands_for(self, weight: torch.Tensor) -> bool:
        """Return whether the weight is still in the memory in which it was, and no other tensor took its place."""
        own = self.weight
        return own.data_ptr() == weight.data_ptr() and own.shape == weight.shape and own.stride() == weight.stride()

    def used_as(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias in a precision."""
        if self.weight.dtype is dtype:
            return self.weight, self.bias
        if dtype in self._low:
            return self._low[dtype]
        low = self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        if self._is_leaf and torch.is_autocast_cache_enabled():
            self._low[dtype] = low
        return low
