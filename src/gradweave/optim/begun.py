"""A step of which only the writing is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradweave.optim import first_order
from gradweave.optim.apply import Target, apply_all
from gradweave.optim.rules import Manner, Number

Other = tuple[torch.Tensor, dict[str, Any]]
"""A parameter for the first-order rule, and its hyperparameters."""


@dataclass(frozen=True)
class Plain:
    """A parameter for the first-order rule, with what its update needs."""

    p: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any]
    group: dict[str, Any]


@dataclass(frozen=True)
class Begun:
    """What a step is to do to each parameter.

    Attributes:
        targets: Weights and biases of layers.
        plain: Everything else.
        keep: Whether the step is taken, on the device.
        inverse: What gradients for the first-order rule are multiplied by.
        manner: Of the optimizer.
    """

    targets: list[Target]
    plain: list[Plain]
    keep: torch.Tensor
    inverse: Number
    manner: Manner

    def finish(self, params: Sequence[torch.Tensor] | None = None) -> None:
        """Updates some of the parameters, or all; each result is its own, whichever others come with it."""
        wanted = None if params is None else set(map(id, params))
        apply_all([t for t in self.targets if wanted is None or id(t.p) in wanted], self.keep, self.manner)
        for one in self.plain:
            if wanted is None or id(one.p) in wanted:
                grad = one.grad * (-self.inverse if one.group["maximize"] else self.inverse)
                first_order.update(one.p, grad, one.state, one.group, self.keep)
