"""Whether taking weight gradients out of order pays: found out over real steps, or from measured costs."""

from __future__ import annotations

from statistics import median
from typing import Literal

import torch

from gradweave._compat.eager import flat_leaves
from gradweave._logging import announce
from gradweave._runtime import ab_trial
from gradweave._runtime.ab_trial import ABTrial, Clock, HostClock
from gradweave._runtime.backward import BackwardEnd
from gradweave.schedule.builders import single
from gradweave.schedule.costs import Costs
from gradweave.schedule.policies import plan

Choice = Literal["stock", "side_stream"]
PATIENCE = 100
"""Forwards without a backward after which nothing is tried any more."""


class Trial:
    """Stock order and split layers take turns over real steps; then the faster one stays.

    What is timed is a forward and its backward, from the first forward after a backward to the end of the
    next, with the device idle before and after: loading data, updates and evaluation do not count, nor
    does how often gradients are accumulated. All steps give the same result, whatever is being tried.

    Attributes:
        splits: Whether layers are to be split in the coming forward.
        chosen: ``"stock"`` or ``"side_stream"``, once that is known.
        reason: Why.
    """

    def __init__(self, device: torch.device, *, clock: Clock | None = None) -> None:
        self.splits = False
        self.chosen: Choice | None = None
        self.reason = ""
        self._device = device
        ways: list[Choice] = ["stock", "side_stream"]
        self._trial = ABTrial(ways, clock or HostClock(device), rules=ab_trial.RULES, each_step=True)
        self._is_in_step = False
        self._end = BackwardEnd(self._end_backward)
        self._unanswered = 0

    def begin_forward(self) -> None:
        """A forward that needs gradients is about to run."""
        if self.chosen is not None:
            return
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
        """The forward is through: its backward will begin with one of these."""
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
        timed = f"forward and backward took {1e3 * stock:.3f} ms in stock order, {1e3 * split:.3f} ms so"
        self._choose("side_stream" if self._trial.paying() else "stock", timed)

    def _choose(self, chosen: Choice, reason: str) -> None:
        self.chosen, self.reason = chosen, reason
        self.splits = chosen != "stock"
        announce(f"reorder: {self.describe()}")

    def describe(self) -> str:
        """What was chosen, and why."""
        if self.chosen is None:
            return f"measuring stock order and split layers in turn, {self._trial.turns_left} turns to go"
        doing = "weight gradients on a second stream" if self.splits else "the step is left alone"
        return f"{doing}: {self.reason}"


def predicted(costs: Costs) -> tuple[bool, str]:
    """Whether the joint schedule of measured costs is worth carrying out, and why."""
    graph = single(costs)
    stock, joint = (plan(graph, policy=policy).simulate().step_time for policy in ("in_order", "joint"))
    pays = joint <= ab_trial.RULES.most * stock
    return pays, f"a step should take {1e3 * stock:.3f} ms in stock order, {1e3 * joint:.3f} ms so"
