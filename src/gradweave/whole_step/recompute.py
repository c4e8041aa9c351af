"""Trading time for memory: activations computed anew in backward instead of kept from forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from gradweave.compat import fake_mode, fake_of, rematerialize

AS_TORCH_DOES = 1.0
"""The budget at which only what costs no time is computed anew, and what the user has marked."""


def with_recomputation(
    forward: GraphModule,
    inputs: Sequence[torch.Tensor],
    trainable: Sequence[int],
    budget: float | None,
    *,
    exact: bool,
) -> Callable[..., Any]:
    """A forward whose backward computes activations anew, so as to keep to a budget.

    Args:
        forward: As Dynamo captured it.
        inputs: Of the forward; not changed.
        trainable: Which inputs need gradients.
        budget: Share of the activations that may be kept; None for what ``torch.compile`` would keep.
            What activation checkpointing marks is computed anew in any case, its random numbers being
            those of the forward.
        exact: Whether results must be those of the eager operations, bit for bit. Then nothing is
            computed anew without a budget or checkpointing.
    """
    if budget is None:
        if exact and not any(
            "checkpoint" in str(node.target) for node in forward.graph.nodes if node.op == "call_function"
        ):
            return forward
        budget = AS_TORCH_DOES
    mode = fake_mode()
    fakes = [fake_of(mode, x) for x in inputs]
    for index in trainable:
        fakes[index].requires_grad_()
    with torch.enable_grad():
        return rematerialize(forward, fakes, budget, decompose=not exact)
