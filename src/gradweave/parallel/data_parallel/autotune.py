"""The search for the fastest arrangement of steps: measured, simulated, tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from gradweave._runtime.ab_trial import ABTrial, DeviceClock, TrialRules
from gradweave._runtime.peers.link import measure_all_reduce
from gradweave._runtime.peers.replica_messages import naming_lost_peers
from gradweave.parallel.data_parallel.layers import Layer
from gradweave.parallel.data_parallel.step_costs import StepWatch
from gradweave.schedule.builders import data_parallel
from gradweave.schedule.costs import Costs
from gradweave.schedule.links import Link
from gradweave.schedule.policies import plan
from gradweave.schedule.timeline import Timeline

WORTH_TRYING = 0.03
"""Share of a step that an arrangement must win by prediction before steps are spent on trying it."""
TRIAL_RULES = TrialRules(warm_up=4, timed=4, rounds=2, most=0.99)
"""Fewer rounds than elsewhere, since the simulation proposes the candidate; a longer warm-up, since the messages of a
turn reach into the next."""
_WATCHED_STEPS = 4
_SIMULATED_STEPS = 3


@dataclass(frozen=True)
class Arrangement:
    """An order of the tasks of a step.

    Attributes:
        barrier: Whether backward ends with all gradients averaged, and updates run in stock order.
        k: Number of first layers whose weight gradients are held back to the end of backward.
    """

    barrier: bool
    k: int = 0

    def __str__(self) -> str:
        if self.barrier:
            return "in stock order, with a barrier before the update"
        held = f", weight gradients of the first {self.k} layers last" if self.k else ""
        return f"no barrier between steps{held}"


STOCK = Arrangement(barrier=True)


class State(Enum):
    """State of a :class:`~gradweave.DataParallel`.

    LEARNING is one step in stock order, in which the order of the layers is observed. It becomes SETTLED if the user
    has given the arrangement, or if there is one rank; otherwise MEASURING, for a few steps in stock order. MEASURING
    becomes TRYING if the simulator promises a faster arrangement that is to be confirmed, otherwise SETTLED. TRYING, in
    which the arrangements take turns, becomes SETTLED.

    Every state becomes LEARNING when other parameters are trained, and DETACHED, for good, by ``detach()``.
    """

    LEARNING = auto()
    MEASURING = auto()
    TRYING = auto()
    SETTLED = auto()
    DETACHED = auto()


@dataclass(frozen=True)
class Prediction:
    """Result of simulating steps in stock order and in the best arrangement.

    Attributes:
        stock: Seconds of a step in stock order.
        best: Seconds of a step in the best arrangement found.
        arrangement: The best arrangement found.
        ratio: Seconds of communication per second of computation.
    """

    stock: float
    best: float
    arrangement: Arrangement
    ratio: float


def simulate(
    costs: Costs, link: Link, replicas: int, bucket_bytes: int, byte_budget: int | None, k: int | None = None
) -> tuple[Prediction, Timeline]:
    """Simulate steps in stock order and with weight gradients held back.

    Args:
        costs: Costs of the layers.
        link: The link between the replicas.
        replicas: Number of replicas.
        bucket_bytes: Bytes at which a message is full.
        byte_budget: Bytes that held-back weight gradients may keep alive; None for no bound.
        k: Number of layers to hold back; None for the number that the simulator finds best.

    Returns:
        The prediction, and the timeline of the best arrangement.
    """
    graph = data_parallel(costs, replicas=replicas, link=link, steps=_SIMULATED_STEPS)
    stock = plan(graph, policy="ddp", bucket_bytes=bucket_bytes).simulate()
    schedule = plan(graph, policy="reverse_first_k", k=k, bucket_bytes=bucket_bytes, byte_budget=byte_budget)
    best = schedule.simulate()
    compute = sum(c.forward + c.input_grad + c.weight_grad + c.update for c in costs.layers)
    sent = sum(c.parameter_bytes for c in costs.layers)
    ratio = link.all_reduce_seconds(sent, replicas) / max(compute, 1e-12)
    chosen = Arrangement(barrier=False, k=int(schedule.options["k"]))
    return Prediction(stock.step_time, best.step_time, chosen, ratio), best


class Tuner:
    """Measures steps, simulates, tries, and decides, the same on all ranks.

    Args:
        layers: The layers of the model, in the order of the forward.
        optimizer: The optimizer that takes the steps.
        group: The ranks that decide together.
        device: The device that computes.
        bucket_bytes: Bytes at which a message is full.
        byte_budget: Bytes that held-back weight gradients may keep alive; None for no bound.
        confirm: Try what the simulation proposes, and keep it only if it is faster.

    Attributes:
        state: MEASURING, TRYING or SETTLED.
        watch: Measures the steps while the state is MEASURING; None afterwards.
        reason: Findings so far, for :meth:`~gradweave.DataParallel.explain`.
        arrangement: The arrangement that is tried, or was chosen.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        optimizer: Optimizer,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        bucket_bytes: int,
        byte_budget: int | None,
        confirm: bool,
    ) -> None:
        self.state = State.MEASURING
        self.watch: StepWatch | None = StepWatch(layers, optimizer, device)
        self.reason = "measuring"
        self.arrangement = STOCK
        self._group, self._device = group, device
        self._bucket_bytes, self._byte_budget = bucket_bytes, byte_budget
        self._confirm = confirm
        self._trial: ABTrial[Arrangement] | None = None

    def next_arrangement(self) -> Arrangement:
        """Return the arrangement of the step that begins now."""
        if self.state is State.MEASURING:
            return STOCK
        if self._trial is not None:
            self._trial.step_ended()
            return self._trial.current
        return self.arrangement

    def agree(self) -> State:
        """Decide what can be decided by now, and return the state.

        All ranks call it in the same backward, after the replica check has found that they have taken equally many
        steps: so all send the same messages here, and come to the next state at the same step.
        """
        if self.watch is not None and self.watch.steps >= _WATCHED_STEPS:
            self._propose(self.watch)
        elif self._trial is not None and self._trial.is_over:
            self._decide(self._trial)
        return self.state

    def close(self) -> None:
        """Remove the hooks of the measurement, if it goes on."""
        if self.watch is not None:
            self.watch.close()
        self.watch = self._trial = None

    def _propose(self, watch: StepWatch) -> None:
        """End the measurement, and simulate the step that the first rank has measured over the link of all."""
        costs, self.watch = watch.close(), None
        agreed = [costs]
        with naming_lost_peers("costs could not be agreed on"):
            dist.broadcast_object_list(agreed, dist.get_global_rank(self._group, 0), group=self._group)
            link = measure_all_reduce(self._group, self._device, sum(c.parameter_bytes for c in agreed[0].layers))
        ranks = dist.get_world_size(self._group)
        prediction, _ = simulate(agreed[0], link, ranks, self._bucket_bytes, self._byte_budget)
        stock, best = prediction.stock, prediction.best
        self.reason = (
            f"communication is {prediction.ratio:.2f} of computation; simulated {1e3 * best:.1f} ms a step "
            f"against {1e3 * stock:.1f} ms in stock order"
        )
        if not self._confirm:
            self.state, self.arrangement = State.SETTLED, prediction.arrangement
        elif best > (1 - WORTH_TRYING) * stock:
            self.state, self.arrangement = State.SETTLED, STOCK
        else:
            self.state, self.arrangement = State.TRYING, prediction.arrangement
            ways, clock = [STOCK, self.arrangement], DeviceClock(self._device)
            self._trial = ABTrial(ways, clock, rules=TRIAL_RULES, each_step=True)

    def _decide(self, trial: ABTrial[Arrangement]) -> None:
        """End the trial, and keep what was tried if it pays on the slowest rank."""
        slowest = self._slowest(trial.seconds())
        stock, proposed = map(median, slowest)
        paying = trial.paying(lambda _: slowest)
        self.arrangement = paying[0] if paying else STOCK
        self.state, self._trial = State.SETTLED, None
        self.reason = f"{self.reason}; measured {1e3 * proposed:.1f} ms against {1e3 * stock:.1f} ms"

    def _slowest(self, seconds: list[list[float]]) -> list[list[float]]:
        """Return the longest time of any rank, by way and round; the same on all ranks."""
        times = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        with naming_lost_peers("times could not be agreed on"):
            dist.all_reduce(times, dist.ReduceOp.MAX, group=self._group)
        return times.tolist()
