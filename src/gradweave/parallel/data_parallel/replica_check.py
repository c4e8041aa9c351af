"""Whether replicas have done the same: compared where all ranks come together anyway."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave._runtime.replicas import Replicas, is_due, settings_of
from gradweave.parallel.data_parallel.failures import naming_lost_peers


class Together:
    """Compares how many steps ranks have taken, and their weights behind a step.

    Weights are compared as they were behind the last step: before a backward they may differ for a good reason, as
    where a loop looks for a sharper place around them, on each rank for itself.

    Args:
        model: Whose weights.
        optimizer: Whose steps.
        group: Whose ranks.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, group: dist.ProcessGroup) -> None:
        self._steps = 0
        self._rounds = 0
        self._takes, self._has_taken = True, False
        self._replicas = Replicas(
            lambda: [(name, p) for name, p in model.named_parameters() if p.requires_grad],
            group,
            of="DataParallel",
            facts=lambda: settings_of(optimizer),
        )

    def stepped(self) -> None:
        """Counts a step of this rank."""
        self._steps += 1
        if self._takes:
            self._replicas.take()
            self._has_taken = True

    def meet(self, *, is_unsettled: bool) -> None:
        """Counts a round of gradients, and compares in the first and once in a while, before they are averaged.

        Args:
            is_unsettled: How steps are arranged may change, which all ranks must do at the same step: compare now.
        """
        now = self._rounds
        self._rounds += 1
        if is_unsettled or is_due(now):
            with naming_lost_peers("replicas could not be compared"):
                self._replicas.compare(
                    f"before gradients are averaged for the {now + 1}. time", {"the number of steps taken": self._steps}
                )
        if self._has_taken:
            self._takes = self._has_taken = False
        if now < 2 or is_due(now + 1):
            self._takes = True
