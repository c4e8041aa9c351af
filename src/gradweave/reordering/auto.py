"""Measurements and predictions of whether weight gradients out of order pay."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Literal

import torch

from gradweave._compat.functions import flat_leaves
from gradweave._logging import announce
from gradweave._runtime import ab_trial
from gradweave._runtime.ab_trial import ABTrial, Clock, HostClock
from gradweave._runtime.backward import BackwardEnd
from gradweave.reordering.executor import plan_within_budget
from gradweave.schedule.builders import single
from gradweave.schedule.costs import Costs
from gradweave.schedule.policies import plan

Choice = Literal["stock", "side_stream"]
PATIENCE = 100
"""Number of forwards without a backward after which the trial is given up."""


class Trial:
    """A trial of stock order and split layers in turn over real steps, by which the faster one stays.

    It times a forward and its backward: from the first forward after a backward to the end of the next backward, with
    the device idle before and after. Data loading, updates, evaluation and accumulation do not count. All steps give
    the stock result, whichever is being tried.

    Args:
        device: The model's device.
        clock: Measures the steps (default: the host's clock, with the device idle).

    Attributes:
        decided: Called with the choice, once it has been made.
        splits: Whether layers are to be split in the coming forward.
        chosen: The choice; None while the trial runs.
        reason: The reason for the choice.
    """

    def __init__(self, device: torch.device, *, clock: Clock | None = None) -> None:
        self.splits = False
        self.chosen: Choice | None = None
        self.reason = ""
        self.decided: Callable[[Choice], None] = lambda _: None
        self._device = device
        ways: list[Choice] = ["stock", "side_stream"]
        self._trial = ABTrial(ways, clock or HostClock(device), rules=ab_trial.RULES, each_step=True)
        self._is_in_step = False
        self._end = BackwardEnd(self._end_backward)
        self._unanswered = 0

    def begin_forward(self) -> None:
        """Begin a step: a forward that needs gradients is about to run."""
        if self.chosen is not None:
            return
        # A step that is being captured runs nothing that could be timed, and its order is fixed from now on.
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._choose(
                "stock", "a CUDA graph was captured before it was measured; give costs=measure_costs(...), or a policy"
            )
            return
        self._unanswered += 1
        if self._unanswered > PATIENCE:
            self._choose("stock", f"{PATIENCE} forwards were followed by no backward from what they return")
        else:
            self._is_in_step = True
            self._trial.begin_step()

    def end_forward(self, output: object) -> None:
        """End the forward of a step, whose backward will begin at one of the returned tensors."""
        if self.chosen is not None:
            return
        returned = [t for t in flat_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        for tensor in returned:
            tensor.register_hook(self._in_backward)
        if not returned:
            self._is_in_step = False
            self._trial.cancel_step()

    def _in_backward(self, _: torch.Tensor) -> None:
        self._end.note()

    def _end_backward(self, _: int) -> None:
        if self.chosen is not None or not self._is_in_step:
            return
        self._is_in_step = False
        self._unanswered = 0
        self._trial.end_step()
        self.splits = self._trial.current != "stock"
        if self._trial.is_over:
            self._judge()

    def _judge(self) -> None:
        stock, split = map(median, self._trial.seconds())
        timed = f"forward and backward took {1e3 * stock:.3f} ms in stock order, {1e3 * split:.3f} ms out of order"
        self._choose("side_stream" if self._trial.paying() else "stock", timed)

    def _choose(self, chosen: Choice, reason: str) -> None:
        self.chosen, self.reason = chosen, reason
        self.splits = chosen != "stock"
        announce(f"reorder: {self.describe()}")
        self.decided(chosen)

    def describe(self) -> str:
        """Return what was chosen, and why."""
        if self.chosen is None:
            return f"measuring stock order and split layers in turn, {self._trial.turns_left} turns to go"
        doing = "weight gradients on a second stream" if self.splits else "the step is left alone"
        return f"{doing}: {self.reason}"


def predicted(costs: Costs, byte_budget: int | None = None) -> tuple[bool, str]:
    """Return whether the joint schedule of measured costs is worth carrying out, and why."""
    stock = plan(single(costs), policy="in_order").simulate().step_time
    joint = plan_within_budget(costs, "joint", byte_budget).simulate().step_time
    pays = joint <= ab_trial.RULES.most * stock
    return pays, f"a step should take {1e3 * stock:.3f} ms in stock order, {1e3 * joint:.3f} ms in the joint order"
