"""Programs: what each rank of a pipeline does, in order. Every schedule is simulated and run in this form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast, get_args

from gradweave._compat.pipelining import Action, torch_program
from gradweave.errors import ArgumentError
from gradweave.schedule import Costs, Kind, Lane, PolicyName, Schedule, TaskGraph, Timeline, pipeline, plan
from gradweave.schedule.links import Link
from gradweave.schedule.list_scheduling import link_lanes
from gradweave.schedule.policies.stage_programs import check_in_flight
from gradweave.schedule.transforms import device_name, place

OwnPolicy = Literal["fast_forward", "modulo", "memory_bounded"]
"""Orders of gradweave's, which torch's runtime is told to follow."""
TorchPolicy = Literal["gpipe", "one_f_one_b", "interleaved", "interleaved_zero_bubble", "zbv"]
"""Schedules that torch has classes for."""
PipelinePolicy = Literal["auto", OwnPolicy, TorchPolicy]

OWN: tuple[str, ...] = get_args(OwnPolicy)
TORCHS: tuple[str, ...] = get_args(TorchPolicy)
POLICIES = (*OWN, *TORCHS)
ONE_STAGE = ("fast_forward", "gpipe", "one_f_one_b")
"""Policies that give each rank one run of layers."""
V_SHAPED = ("zbv",)
"""Policies that give each rank two: one on the way up, one on the way down."""

_IN_FLIGHT = {"F": 1, "X": 0, "W": -1, "B": -1}


@dataclass(frozen=True)
class Program:
    """What each rank does, in order.

    Attributes:
        policy: Name of the policy that made it.
        ranks: The actions of each rank: what (F, X, W, or B for X and W together), stage and micro-batch.
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
        """Number of stages on all ranks."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of one rank, in order."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    @cached_property
    def most_in_flight(self) -> tuple[int, ...]:
        """For each rank, the most micro-batches whose activations one of its stages keeps at once."""
        return tuple(max(self._most_kept(rank).values(), default=0) for rank in range(len(self.ranks)))

    def _most_kept(self, rank: int) -> Counter[int]:
        kept: Counter[int] = Counter()
        most: Counter[int] = Counter()
        for what, stage, _ in self.ranks[rank]:
            kept[stage] += _IN_FLIGHT[what]
            most[stage] = max(most[stage], kept[stage])
        return most

    def schedule(self, costs: Costs, runs: Sequence[range], *, link: Link = Link()) -> Schedule:
        """Return the program spelled out as tasks of single layers.

        Args:
            costs: One entry per layer.
            runs: The layers of each stage.
            link: Between ranks.
        """
        ranks = len(self.ranks)
        graph = pipeline(costs, stages=ranks, microbatches=self.microbatches, link=link)
        stage_of = {layer: stage for stage, run in enumerate(runs) for layer in run}
        graph = place(graph, lambda layer: self.rank_of[stage_of[layer]])
        lanes = []
        for rank, actions in enumerate(self.ranks):
            order = [i for what, stage, microbatch in actions for i in _tasks(graph, what, runs[stage], microbatch)]
            order += graph.find(Kind.U, [layer for stage in self.stages_of(rank) for layer in runs[stage]], 0)
            lanes.append(Lane(device_name(rank), device_name(rank), tuple(order)))
        return Schedule(graph, (*lanes, *link_lanes(graph)), policy=self.policy)

    def predict(self, costs: Costs, runs: Sequence[range], *, link: Link = Link()) -> Timeline:
        """Return the simulated timeline of one step; arguments are those of :meth:`schedule`."""
        return replace(self.schedule(costs, runs, link=link).simulate(), title=self.policy)


def _tasks(graph: TaskGraph, what: str, layers: range, microbatch: int) -> Iterator[int]:
    index = graph.index
    if what == "F":
        return (index[Kind.F, layer, microbatch, 0] for layer in layers)
    kinds = (Kind.W, Kind.X) if what == "B" else (Kind(what),)
    return (index[kind, layer, microbatch, 0] for layer in reversed(layers) for kind in kinds)


def make_program(policy: str, graph: TaskGraph, **options: Any) -> Program:
    """Apply a policy to the stages of a pipeline.

    Args:
        policy: One of :data:`POLICIES`.
        graph: Stages in place of layers, as :func:`~gradweave.parallel.pipeline.partition.stage_graph` makes it.
        **options: Of the policy, as for :func:`gradweave.plan`; torch's schedules take none.
    """
    max_in_flight = options.get("max_in_flight")
    check_in_flight(max_in_flight)
    ranks, stages, microbatches = graph.cluster.devices, graph.layers, graph.microbatches
    if policy not in POLICIES:
        raise ArgumentError("policy", policy, f"use one of auto, {', '.join(POLICIES)}")
    if stages % ranks:
        raise ArgumentError("stages", stages, f"give a multiple of the {ranks} ranks")
    if policy in ONE_STAGE and stages != ranks:
        raise ArgumentError("stages", stages, f"{policy} has one per rank, {ranks}; use modulo or interleaved")
    if policy in V_SHAPED and stages != 2 * ranks:
        raise ArgumentError("stages", stages, f"{policy} has two per rank, {2 * ranks}")
    if policy in TORCHS and max_in_flight is not None:
        remedy = f"{policy} is torch's, which takes no cap; use fast_forward or modulo"
        raise ArgumentError("max_in_flight", max_in_flight, remedy)
    if policy == "one_f_one_b" and microbatches < ranks:  # torch's class refuses to run fewer
        raise ArgumentError("microbatches", microbatches, f"{policy} needs one per rank at least, {ranks}")
    if policy in TORCHS and policy not in ONE_STAGE:
        orders = _order_of_torch(policy, ranks, stages // ranks, microbatches)
    else:
        orders = _actions(plan(graph, policy=cast(PolicyName, policy), **options), ranks)
    return Program(policy, tuple(map(tuple, orders)), microbatches, max_in_flight)


def _actions(schedule: Schedule, ranks: int) -> list[list[Action]]:
    """Return the actions of each rank in a schedule whose layers are stages."""
    orders: list[list[Action]] = []
    for lane in schedule.lanes[:ranks]:
        order: list[Action] = []
        for task in (schedule.graph.tasks[index] for index in lane.tasks):
            if task.kind is Kind.X and order[-1:] == [("W", task.layer, task.microbatch)]:
                order[-1] = "B", task.layer, task.microbatch  # policies that do not split backward spell it W, X
            elif task.kind is not Kind.U:
                order.append((task.kind.value, task.layer, task.microbatch))
        orders.append(order)
    return orders


def _order_of_torch(policy: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[Action]]:
    try:
        return torch_program(policy, ranks, stages_per_rank, microbatches)
    except ValueError as error:
        raise ArgumentError("microbatches", microbatches, f"torch refuses {policy}: {error}") from None
