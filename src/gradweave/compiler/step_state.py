"""State of a compiled step that its graphs share."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave.compiler.lanes import Clock
from gradweave.compiler.left_work import LeftWork
from gradweave.compiler.step_counts import StepCounts
from gradweave.schedule.costs import Costs
from gradweave.schedule.schedule import Schedule
from gradweave.step_graph.recording import Mark


class CallState(Enum):
    """Progress of one call of a step.

    A call begins PENDING, and stays it while Dynamo looks for a graph and one is made: what fails until then has
    changed nothing, and the step can be taken eagerly. It becomes BEGUN when a graph starts to run; an error after that
    is raised, because weights may have changed. When the graph has run, the call is

    - UPDATED: the step is taken;
    - ACCUMULATED: gradients are added to those of earlier micro-batches, as was asked for;
    - UPDATE_LEFT: gradients are added up, and the update must follow eagerly, because parameters that the graph does
      not know have gradients.

    A call that is still PENDING when the objective returns was run by Python: Dynamo is switched off.
    """

    PENDING = auto()
    BEGUN = auto()
    UPDATED = auto()
    ACCUMULATED = auto()
    UPDATE_LEFT = auto()


class StepState:
    """State that the graphs of one step share, besides the model and the optimizer.

    Args:
        optimizer: The optimizer.

    Attributes:
        call: Progress of the current call, or of the last one.
        batch: The leaves of the batch of the current call.
        sums: The gradients of earlier micro-batches, by parameter.
        update: Whether the next step is to update, or only to add up gradients.
        signals: Sums of what all ranks have told of the last step that was a graph; None where nothing is averaged.
        norm: Of all gradients in the last update; None where it is not computed.
        mark: The context of each task if steps are recorded, otherwise None.
        layers: The modules of the last recorded step, by number.
        costs: By which steps are planned; None if they are not known.
        are_costs_ours: Whether they were measured here, and not given.
        left: What the last step has left to the next one; None if the policy of the step leaves nothing.
        schedule: By which the last step ran that was a graph; None if its compiler chose the order.
        clock: Notes what runs when, if the next step is to be measured.
        padding_values: By position in the batch, what integers may be padded with, None where that is not known. None
            until a graph was made.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._counts: StepCounts | None = None
        self.call = CallState.PENDING
        self.batch: Sequence[Any] = ()
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        self.update = True
        self.signals: torch.Tensor | None = None
        self.norm: torch.Tensor | None = None
        self.mark: Mark | None = None
        self.layers: tuple[str, ...] = ()
        self.costs: Costs | None = None
        self.are_costs_ours = False
        self.left: LeftWork | None = None
        self.schedule: Schedule | None = None
        self.clock: Clock | None = None
        self.padding_values: dict[int, int | None] | None = None

    def counts(self, params: Sequence[nn.Parameter]) -> StepCounts:
        """Return the step counts of some parameters, made if there are none that fit."""
        counts = self._counts
        if counts is None or not counts.covers(params) or not counts.refresh():
            counts = self._counts = StepCounts(self._optimizer, params)
        return counts

    def release_counts(self) -> None:
        """Undo what :meth:`counts` has done to the optimizer's state."""
        if self._counts is not None:
            self._counts.release()
            self._counts = None

    def has(self, counts: StepCounts) -> bool:
        """Return whether these counts are the current ones."""
        return counts is self._counts

    def is_current(self, counts: StepCounts) -> bool:
        """Return whether these counts are the current ones and agree with the optimizer's state, or can be made to."""
        return counts is self._counts and counts.refresh()

    def sums_for(self, params: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """Return the gradients of earlier micro-batches; they are what ``.grad`` is, also if others have changed it."""
        for p in params:
            total = self.sums.get(p)
            if total is None or total.shape != p.shape or total.dtype is not p.dtype or total.device != p.device:
                total = self.sums[p] = torch.zeros_like(p)
            if p.grad is None:
                total.zero_()
            elif p.grad is not total:
                total.copy_(p.grad)
        return [self.sums[p] for p in params]

    def show_sums(self, params: Sequence[nn.Parameter]) -> None:
        """Make the sums the ``.grad`` of parameters."""
        for p in params:
            p.grad = self.sums[p]
