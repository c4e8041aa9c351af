"""Whether taking weight gradients out of order pays: found out over real steps, or from measured costs."""

from __future__ import annotations

import time
from statistics import median

import torch

from gradweave._compat.eager import at_end_of_backward, current_backward, flat_leaves
from gradweave._logging import announce
from gradweave.schedule.builders import single
from gradweave.schedule.costs import Costs
from gradweave.schedule.policies import plan

WARM_UP_STEPS = 2
TIMED_STEPS = 4
ROUNDS = 3
WORTH_IT = 0.97
"""Most of stock order's time that it may take to be kept; measured, it must also be faster in every round."""
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

    def __init__(self, device: torch.device) -> None:
        self.splits = False
        self.chosen: str | None = None
        self.reason = ""
        self._device = device
        self._schedule = [False, True] * ROUNDS
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self._spans: list[float] = []
        self._began: float | None = None
        self._ends_with: int | None = None
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
        elif self._began is None:
            self._began = self._now()

    def end_forward(self, output: object) -> None:
        """The forward is through: its backward will begin with one of these."""
        if self.chosen is not None:
            return
        returned = [t for t in flat_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        for tensor in returned:
            tensor.register_hook(self._in_backward)
        if not returned:
            self._began = None

    def _in_backward(self, _: torch.Tensor) -> None:
        if self._ends_with != current_backward():
            self._ends_with = current_backward()
            at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        if self.chosen is not None or self._began is None:
            return
        self._spans.append(self._now() - self._began)
        self._began = None
        self._unanswered = 0
        if len(self._spans) == WARM_UP_STEPS + TIMED_STEPS:
            self._times[self._schedule.pop(0)].append(sum(self._spans[WARM_UP_STEPS:]) / TIMED_STEPS)
            self._spans = []
            if self._schedule:
                self.splits = self._schedule[0]
            else:
                self._judge()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _judge(self) -> None:
        stock, split = self._times[False], self._times[True]
        timed = (
            f"forward and backward took {1e3 * median(stock):.3f} ms in stock order, {1e3 * median(split):.3f} ms so"
        )
        always = all(a < b for a, b in zip(split, stock, strict=True))
        pays = always and median(split) <= WORTH_IT * median(stock)
        self._choose("side_stream" if pays else "stock", timed)

    def _choose(self, chosen: str, reason: str) -> None:
        self.chosen, self.reason = chosen, reason
        self.splits = chosen != "stock"
        announce(f"reorder: {self.describe()}")

    def describe(self) -> str:
        """What was chosen, and why."""
        if self.chosen is None:
            return f"measuring stock order and split layers in turn, {len(self._schedule)} turns to go"
        doing = "weight gradients on a second stream" if self.splits else "the step is left alone"
        return f"{doing}: {self.reason}"


def predicted(costs: Costs) -> tuple[bool, str]:
    """Whether the joint schedule of measured costs is worth carrying out, and why."""
    graph = single(costs)
    stock, joint = (plan(graph, policy=policy).simulate().step_time for policy in ("in_order", "joint"))
    return joint <= WORTH_IT * stock, f"a step should take {1e3 * stock:.3f} ms in stock order, {1e3 * joint:.3f} ms so"
