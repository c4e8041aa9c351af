"""What each rank of a pipeline does, in order: the form in which every schedule is simulated and run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from gradweave._compat.pipelining import Action, torch_program
from gradweave.errors import ArgumentError
from gradweave.schedule.builders import pipeline
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.links import Link
from gradweave.schedule.policies import PolicyName, plan
from gradweave.schedule.policies.stage_programs import check_in_flight
from gradweave.schedule.tasks import Kind

OURS = ("fast_forward", "modulo")
TORCHS = ("gpipe", "one_f_one_b", "interleaved", "interleaved_zero_bubble", "zbv")
POLICIES = (*OURS, *TORCHS)
ONE_STAGE = ("fast_forward", "gpipe", "one_f_one_b")
"""Those that give each rank one run of layers."""
V_SHAPED = ("zbv",)
"""Those that give each rank two: one on the way up, one on the way down."""

_ACTIONS = {Kind.F: "F", Kind.X: "X", Kind.W: "W"}


@dataclass(frozen=True)
class Program:
    """What each rank does, in order.

    Attributes:
        policy: Whose.
        ranks: For each rank its actions: what (F, X, W, or B for X and W together), stage and micro-batch.
        microbatches: Per step.
        max_in_flight: The cap that it was made with.
    """

    policy: str
    ranks: tuple[tuple[Action, ...], ...]
    microbatches: int
    max_in_flight: int | None = None

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        owners = {stage: rank for rank, actions in enumerate(self.ranks) for _, stage, _ in actions}
        return tuple(owners[stage] for stage in sorted(owners))

    @property
    def stages(self) -> int:
        """How many there are, over all ranks."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> list[int]:
        """Those of one rank, in order."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    @cached_property
    def most_in_flight(self) -> tuple[int, ...]:
        """For each rank, the most micro-batches whose activations one of its stages keeps at once."""
        return tuple(max(self._held(rank).values(), default=0) for rank in range(len(self.ranks)))

    def _held(self, rank: int) -> Counter[int]:
        now: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for what, stage, _ in self.ranks[rank]:
            now[stage] += {"F": 1, "X": 0, "W": -1, "B": -1}[what]
            most[stage] = max(most[stage], now[stage])
        return most


def make_program(
    policy: str,
    stage_costs: Sequence[LayerCost],
    *,
    ranks: int,
    microbatches: int,
    max_in_flight: int | None = None,
    link: Link = Link(),
) -> Program:
    """Applies a policy to stages of given costs.

    Args:
        policy: One of :data:`POLICIES`.
        stage_costs: One entry per stage, a multiple of the ranks.
        ranks: Devices.
        microbatches: Per step.
        max_in_flight: Cap on micro-batches that have entered and not left; only for our own policies.
        link: Between ranks; our own policies order work by what transfers cost.
    """
    check_in_flight(max_in_flight)
    count = len(stage_costs)
    if count % ranks:
        raise ArgumentError("stages", count, f"give a multiple of the {ranks} ranks")
    if policy in ONE_STAGE and count != ranks:
        raise ArgumentError("stages", count, f"{policy} has one per rank, {ranks}; use modulo or interleaved")
    if policy in TORCHS:
        if max_in_flight is not None:
            remedy = f"{policy} is torch's, which takes no cap; use fast_forward or modulo"
            raise ArgumentError("max_in_flight", max_in_flight, remedy)
        orders = _of_torch(policy, ranks, count // ranks, microbatches)
        return Program(policy, tuple(tuple(order) for order in orders), microbatches)
    if policy not in OURS:
        raise ArgumentError("policy", policy, f"use one of auto, {', '.join(POLICIES)}")
    graph = pipeline(Costs(tuple(stage_costs)), stages=ranks, microbatches=microbatches, link=link)
    schedule = plan(graph, policy=cast(PolicyName, policy), max_in_flight=max_in_flight)
    tasks = schedule.graph.tasks
    orders = [
        [(_ACTIONS[t.kind], t.layer, t.microbatch) for t in (tasks[i] for i in lane.tasks) if t.kind in _ACTIONS]
        for lane in schedule.lanes[:ranks]
    ]
    return Program(policy, tuple(tuple(order) for order in orders), microbatches, max_in_flight)


def _of_torch(policy: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[Action]]:
    everything = range(microbatches)
    if policy == "gpipe":
        return [[*(("F", rank, i) for i in everything), *(("B", rank, i) for i in everything)] for rank in range(ranks)]
    if policy == "one_f_one_b":
        if microbatches < ranks:
            raise ArgumentError("microbatches", microbatches, f"{policy} needs one per rank at least, {ranks}")
        return [_one_f_one_b(rank, min(ranks - rank, microbatches), microbatches) for rank in range(ranks)]
    if policy in V_SHAPED and stages_per_rank != 2:
        raise ArgumentError("stages", ranks * stages_per_rank, f"{policy} has two per rank, {2 * ranks}")
    try:
        return torch_program(policy, ranks, stages_per_rank, microbatches)
    except ValueError as error:
        raise ArgumentError("microbatches", microbatches, f"torch refuses {policy}: {error}") from None


def _one_f_one_b(stage: int, ahead: int, microbatches: int) -> list[Action]:
    order: list[Action] = [("F", stage, i) for i in range(ahead)]
    for i in range(microbatches):
        order.append(("B", stage, i))
        if i + ahead < microbatches:
            order.append(("F", stage, i + ahead))
    return order
