"""Finding out whether, and how far, holding weight gradients back makes steps faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from gradweave.data_parallel.failures import named
from gradweave.data_parallel.layers import Layer
from gradweave.data_parallel.watch import StepWatch, measure_link
from gradweave.schedule.builders import data_parallel
from gradweave.schedule.costs import Costs
from gradweave.schedule.links import Link
from gradweave.schedule.planning import plan
from gradweave.schedule.timeline import Timeline

WORTH_TRYING = 0.03
"""Share of a step that must be won, by prediction, before steps are spent on trying it."""
WORTH_KEEPING = 0.01
_WARM_UP, _TIMED, _ROUNDS = 3, 4, 2
_WATCHED_STEPS = 4
_SIMULATED_STEPS = 3


@dataclass(frozen=True)
class Arrangement:
    """How steps are arranged.

    Attributes:
        barrier: Whether backward ends with all gradients averaged, and updates in stock order.
        k: How many layers have their weight gradients held back to the end of backward.
    """

    barrier: bool
    k: int = 0

    def __str__(self) -> str:
        if self.barrier:
            return "in stock order, with a barrier before the update"
        held = f", weight gradients of the first {self.k} layers last" if self.k else ""
        return f"no barrier between steps{held}"


STOCK = Arrangement(barrier=True)


@dataclass(frozen=True)
class Prediction:
    """What the simulator says of two ways to take steps.

    Attributes:
        stock: Seconds of a step in stock order.
        best: Seconds of the best arrangement found.
        arrangement: That one.
        ratio: Seconds of communication for one of computation.
    """

    stock: float
    best: float
    arrangement: Arrangement
    ratio: float


def simulate(
    costs: Costs, link: Link, replicas: int, bucket_bytes: int, byte_budget: int | None, k: int | None = None
) -> tuple[Prediction, Timeline]:
    """Predicts steps in stock order and with the best k, or the one given."""
    graph = data_parallel(costs, replicas=replicas, link=link, steps=_SIMULATED_STEPS)
    stock = plan(graph, policy="ddp", bucket_bytes=bucket_bytes).simulate()
    schedule = plan(graph, policy="reverse_first_k", k=k, bucket_bytes=bucket_bytes, byte_budget=byte_budget)
    best = schedule.simulate()
    compute = sum(c.forward + c.input_grad + c.weight_grad + c.update for c in costs.layers)
    sent = sum(c.parameter_bytes for c in costs.layers)
    ratio = link.all_reduce_seconds(sent, replicas) / max(compute, 1e-12)
    chosen = Arrangement(barrier=False, k=int(schedule.options["k"]))
    return Prediction(stock.step_time, best.step_time, chosen, ratio), best


class Trial:
    """Steps in stock order and as proposed, in turns; keeps what is faster.

    Args:
        proposed: What is to be tried.
        slowest: The largest of all ranks' numbers, for each number of a list.
    """

    def __init__(self, proposed: Arrangement, slowest: Callable[[list[float]], list[float]]) -> None:
        self._turns = [STOCK, proposed] * _ROUNDS
        self._proposed = proposed
        self._slowest = slowest
        self._turn, self._taken = 0, 0
        self._seconds: dict[Arrangement, list[float]] = {STOCK: [], proposed: []}
        self._last: float | None = None

    @property
    def now(self) -> Arrangement:
        """How the next step is to be taken."""
        return self._turns[min(self._turn, len(self._turns) - 1)]

    @property
    def is_over(self) -> bool:
        """Whether all turns were taken."""
        return self._turn >= len(self._turns)

    def step_begins(self) -> None:
        """Counts a step, at its beginning; a turn ends behind its last step."""
        moment = time.perf_counter()
        if self._last is not None and self._taken > _WARM_UP:
            self._seconds[self.now].append(moment - self._last)
        self._last = moment
        self._taken += 1
        if self._taken > _WARM_UP + _TIMED:
            self._turn, self._taken, self._last = self._turn + 1, 1, moment

    def verdict(self) -> tuple[Arrangement, float, float]:
        """What to keep, and the seconds of a step in stock order and as proposed, the same on all ranks."""
        stock, proposed = self._slowest([median(self._seconds[STOCK]), median(self._seconds[self._proposed])])
        return (self._proposed if proposed < (1 - WORTH_KEEPING) * stock else STOCK), stock, proposed


class Choice:
    """Watches steps, simulates, tries, and decides, the same on all ranks.

    Args:
        layers: Of the model, in the order of the forward.
        optimizer: Whose steps.
        group: Of the ranks that decide together.
        device: Where they compute.
        bucket_bytes: Of a message.
        byte_budget: Of what is held back.
        confirm: Try what the simulation proposes, and keep it only if it is faster.

    Attributes:
        watch: What measures the steps that are now taken; None when measuring is over.
        reason: What was found so far.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        optimizer: Optimizer,
        group: dist.ProcessGroup,
        device: torch.device,
        bucket_bytes: int,
        byte_budget: int | None,
        *,
        confirm: bool,
    ) -> None:
        self._confirm = confirm
        self.watch: StepWatch | None = StepWatch(layers, optimizer, device)
        self.reason = "measuring"
        self.prediction: Prediction | None = None
        self.is_made = False
        self._group, self._device = group, device
        self._bucket_bytes, self._byte_budget = bucket_bytes, byte_budget
        self._trial: Trial | None = None

    def step_begins(self) -> Arrangement:
        """How the step that begins now is to be taken."""
        if self.watch is not None:
            if self.watch.steps < _WATCHED_STEPS:
                return STOCK
            return self._propose(self.watch)
        if self._trial is None:
            return STOCK
        self._trial.step_begins()
        if not self._trial.is_over:
            return self._trial.now
        chosen, stock, proposed = self._trial.verdict()
        self.is_made = True
        self.reason = f"{self.reason}; measured {1e3 * proposed:.1f} ms against {1e3 * stock:.1f} ms"
        return chosen

    def close(self) -> None:
        """Lets go of what is watched."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None

    def _propose(self, watch: StepWatch) -> Arrangement:
        costs, self.watch = watch.close(), None
        agreed = [costs]
        with named("costs could not be agreed on"):
            dist.broadcast_object_list(agreed, dist.get_global_rank(self._group, 0), group=self._group)
            link = measure_link(self._group, self._device)
        ranks = dist.get_world_size(self._group)
        self.prediction, _ = simulate(agreed[0], link, ranks, self._bucket_bytes, self._byte_budget)
        stock, best = self.prediction.stock, self.prediction.best
        self.reason = (
            f"communication is {self.prediction.ratio:.2f} of computation; simulated {1e3 * best:.1f} ms a step "
            f"against {1e3 * stock:.1f} ms in stock order"
        )
        if not self._confirm:
            self.is_made = True
            return self.prediction.arrangement
        if best > (1 - WORTH_TRYING) * stock:
            self.is_made = True
            return STOCK
        self._trial = Trial(self.prediction.arrangement, self._slowest)
        self._trial.step_begins()
        return self._trial.now

    def _slowest(self, numbers: list[float]) -> list[float]:
        together = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        with named("times could not be agreed on"):
            dist.all_reduce(together, dist.ReduceOp.MAX, group=self._group)
        return list(together.tolist())
