"""Finding out whether, and how far, holding weight gradients back makes steps faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from gradweave._runtime.ab_trial import ABTrial, DeviceClock, TrialRules
from gradweave._runtime.peers.link import measure_all_reduce
from gradweave.parallel.data_parallel.failures import naming_lost_peers
from gradweave.parallel.data_parallel.layers import Layer
from gradweave.parallel.data_parallel.step_costs import StepWatch
from gradweave.schedule.builders import data_parallel
from gradweave.schedule.costs import Costs
from gradweave.schedule.links import Link
from gradweave.schedule.policies import plan
from gradweave.schedule.timeline import Timeline

WORTH_TRYING = 0.03
"""Share of a step that must be won, by prediction, before steps are spent on trying it."""
TRIAL_RULES = TrialRules(warm_up=4, timed=4, rounds=2, most=0.99)
"""Fewer rounds than elsewhere, since a simulation proposes what is tried; messages of a turn reach into the next."""
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
        is_made: Whether the choice is final.
        arrangement: What was chosen, or is being tried.
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
        self.arrangement = STOCK
        self._group, self._device = group, device
        self._bucket_bytes, self._byte_budget = bucket_bytes, byte_budget
        self._trial: ABTrial[Arrangement] | None = None

    def step_begins(self) -> Arrangement:
        """How the step that begins now is to be taken."""
        if self.is_made:
            return self.arrangement
        if self._trial is None:
            return STOCK
        self._trial.step_ended()
        return self._trial.current

    def agree(self) -> None:
        """Decides as far as it can be; all ranks come here together, having taken as many steps."""
        if self.watch is not None:
            if self.watch.steps >= _WATCHED_STEPS:
                self._propose(self.watch)
        elif self._trial is not None and self._trial.is_over and not self.is_made:
            slowest = self._slowest(self._trial.seconds())
            stock, proposed = map(median, slowest)
            paying = self._trial.paying(lambda _: slowest)
            self.arrangement = paying[0] if paying else STOCK
            self.is_made, self._trial = True, None
            self.reason = f"{self.reason}; measured {1e3 * proposed:.1f} ms against {1e3 * stock:.1f} ms"

    def close(self) -> None:
        """Lets go of what is watched."""
        self._trial = None
        if self.watch is not None:
            self.watch.close()
            self.watch = None

    def _propose(self, watch: StepWatch) -> None:
        costs, self.watch = watch.close(), None
        agreed = [costs]
        with naming_lost_peers("costs could not be agreed on"):
            dist.broadcast_object_list(agreed, dist.get_global_rank(self._group, 0), group=self._group)
            link = measure_all_reduce(self._group, self._device, sum(c.parameter_bytes for c in agreed[0].layers))
        ranks = dist.get_world_size(self._group)
        self.prediction, _ = simulate(agreed[0], link, ranks, self._bucket_bytes, self._byte_budget)
        stock, best = self.prediction.stock, self.prediction.best
        self.reason = (
            f"communication is {self.prediction.ratio:.2f} of computation; simulated {1e3 * best:.1f} ms a step "
            f"against {1e3 * stock:.1f} ms in stock order"
        )
        self.arrangement = self.prediction.arrangement
        if not self._confirm:
            self.is_made = True
        elif best > (1 - WORTH_TRYING) * stock:
            self.is_made, self.arrangement = True, STOCK
        else:
            ways, clock = [STOCK, self.arrangement], DeviceClock(self._device)
            self._trial = ABTrial(ways, clock, rules=TRIAL_RULES, each_step=True)

    def _slowest(self, seconds: list[list[float]]) -> list[list[float]]:
        """Return, on all ranks, the longest time that any of them took, by way and round."""
        together = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        with naming_lost_peers("times could not be agreed on"):
            dist.all_reduce(together, dist.ReduceOp.MAX, group=self._group)
        return together.tolist()
