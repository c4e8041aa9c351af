"""What other techniques ask of the fusions that hold a model, without knowing how a fusion works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

import torch
from torch import nn

from gradweave._runtime.claims import Technique, claims_on


class FusedUpdates(Protocol):
    """The attachment that ``fuse()`` returns, as other techniques see it.

    Attributes:
        mode: When updates run.
    """

    mode: Literal["auto", "forward", "backward"]

    @property
    def is_attached(self) -> bool:
        """Whether the attachment is in force."""

    @property
    def in_graph_now(self) -> bool:
        """Whether a CUDA graph of several steps is being captured, with updates deferred from each to the next."""

    def takes_late(self, p: torch.Tensor) -> bool:
        """Return whether the next use of a parameter's gradient is an update in backward, which can wait for it."""


def updated_in_forward(model: nn.Module) -> frozenset[int]:
    """Return the ids of the parameters of a model that a fusion with ``mode="forward"`` updates."""
    return frozenset(p for p, fusion in _updated(model) if fusion.mode == "forward")


def updated_in_backward(model: nn.Module) -> dict[int, FusedUpdates]:
    """Return, by id, the parameters of a model that a fusion with ``mode="backward"`` updates, with that fusion."""
    return {p: fusion for p, fusion in _updated(model) if fusion.mode == "backward"}


def is_deferred_in_graph(model: nn.Module) -> bool:
    """Return whether a CUDA graph of several steps is being captured, with updates deferred between them."""
    return any(fusion.in_graph_now for _, fusion in _updated(model))


def _updated(model: nn.Module) -> Iterator[tuple[int, FusedUpdates]]:
    for claim in claims_on(model, Technique.FUSE):
        fusion: FusedUpdates | None = claim.holder
        if fusion is not None:
            for p in claim.params:
                yield p, fusion
