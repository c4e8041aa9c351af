"""A step of which only the writing is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradweave.optim import first_order
from gradweave.optim.rules import Manner, Number
from gradweave.optim.update import Target, apply_all, times, wide_dtype

Other = tuple[torch.Tensor, dict[str, Any]]
"""A parameter for the first-order rule, and its hyperparameters."""


@dataclass(frozen=True)
class Plain:
    """A parameter for the first-order rule, with what its update needs."""

    p: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any]
    group: dict[str, Any]


class Begun:
    """What a step is to do to each parameter.

    Args:
        targets: Weights and biases of layers.
        plain: Everything else.
        keep: Whether the step is taken, on the device.
        inverse: What gradients for the first-order rule are multiplied by.
        manner: Of the optimizer.
    """

    def __init__(
        self, targets: list[Target], plain: list[Plain], keep: torch.Tensor, inverse: Number, manner: Manner
    ) -> None:
        self._left: dict[int, Target | Plain] = {id(target.p): target for target in targets}
        self._left |= {id(one.p): one for one in plain}
        self._keep = keep
        self._inverse = inverse
        self._manner = manner

    def finish(self, params: Sequence[torch.Tensor] | None = None) -> None:
        """Updates some of the parameters, or all, and lets go of their gradients.

        Each result is its own, whichever others come with it. What is done is not done again, should another fail.
        """
        chosen = [id(p) for p in params if id(p) in self._left] if params is not None else list(self._left)
        targets = [target for key in chosen if isinstance(target := self._left[key], Target)]
        apply_all(targets, self._keep, self._manner)
        for target in targets:
            del self._left[id(target.p)]
        for key in chosen:
            one = self._left.get(key)
            if isinstance(one, Plain):
                factor = -self._inverse if one.group["maximize"] else self._inverse
                grad = times(one.grad.to(wide_dtype(one.p)), factor)
                first_order.update(one.p, grad, one.state, one.group, self._keep)
                del self._left[key]
