"""Optimizers whose step has two phases: prepare it from all gradients, then commit it to some parameters at a time.

Most optimizers update each parameter from its own gradient, and a fusion can run their code on any part of the
parameters. Others decide something over all gradients first: whether the step is taken, or one scale for all layers.
Such an optimizer can still be fused in forward mode if it keeps the two phases apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Protocol, cast

import torch
from torch.optim import Optimizer

Commit = Callable[[Sequence[torch.Tensor]], None]
"""The second phase of a step: updates the given parameters, any part of the optimizer's, each of them once."""


class TwoPhaseStep(Protocol):
    """The protocol between an optimizer that needs all gradients at once and a technique that defers its updates.

    Its commits give the same values for any partition of its parameters and in any order, and its own ``step()`` is
    ``prepare_step()`` followed by a commit of all of them.
    """

    def prepare_step(self) -> Commit:
        """Read all gradients and decide on the step, without changing a parameter.

        Returns:
            The commit, with hyperparameters and gradients as they are now, whatever a scheduler or ``zero_grad()`` does
            to them before it is called.
        """
        ...


def two_phase_step(optimizer: Optimizer) -> TwoPhaseStep | None:
    """Return an optimizer as one with a two-phase step, or None if only its ``step()`` may step it.

    None too for a subclass that overrides ``step()`` but inherits ``prepare_step()``: its step does something that the
    two phases would leave out, such as clipping gradients.
    """
    # isinstance() of a protocol takes tens of microseconds, and a fusion asks in each step.
    owner = next((cls for cls in type(optimizer).__mro__ if "prepare_step" in vars(cls)), None)
    if owner is None:
        return None
    # torch wraps each class's step() in profile_hook_step when its first instance is made: compare what is inside.
    is_own = unwrap(type(optimizer).step) is unwrap(getattr(owner, "step", type(None)))
    return cast("TwoPhaseStep", optimizer) if is_own else None


def is_two_phase(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step has two phases; see :func:`two_phase_step`."""
    return two_phase_step(optimizer) is not None
