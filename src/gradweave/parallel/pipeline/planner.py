"""Which schedule, how many stages, how many micro-batches in flight: found by simulating them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradweave.errors import ArgumentError, GradweaveError, ScheduleError
from gradweave.parallel.pipeline.bounded import ENDLESS, Patience, StageBytes, bounded_orders
from gradweave.parallel.pipeline.partition import cut, stage_bytes, stage_costs
from gradweave.parallel.pipeline.prediction import predict
from gradweave.parallel.pipeline.programs import ONE_STAGE, OURS, POLICIES, V_SHAPED, Program, make_program
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.links import Link

SPLITS = ("fast", "torch")
_AS_GOOD = 1.005
"""Plans within this of the fastest count as fast; the one with the least memory is taken."""
_FEW = (Patience(0, 1, False), Patience(0, 2, True), Patience(1, 1, False), Patience(4, 0, True))
_MANY = (
    ENDLESS,
    *(Patience(base, slope, first) for base in (0, 1, 2, 4) for slope in (0, 1, 2) for first in (False, True)),
)
_SHARES = (1.0, 0.93, 0.86, 0.8)
"""Of the budget: what stages keep is a bound on what their layers do but for the layer that runs."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        policy: A schedule, or "auto".
        microbatches: Per step.
        group: Layers per stage; None to find out.
        max_in_flight: Cap on micro-batches in flight; None to find out.
        byte_budget: What a rank may hold for micro-batches in flight; None for no bound.
        split: Who takes X and W apart.
    """

    policy: str
    microbatches: int
    group: int | None = None
    max_in_flight: int | None = None
    byte_budget: int | None = None
    split: str = "fast"

    def check(self) -> None:
        """Rejects what no pipeline could do."""
        if self.policy != "auto" and self.policy not in POLICIES:
            raise ArgumentError("policy", self.policy, f"use one of auto, {', '.join(POLICIES)}")
        if self.split not in SPLITS:
            raise ArgumentError("split", self.split, f"use one of {', '.join(SPLITS)}")
        for name in ("microbatches", "group", "max_in_flight", "byte_budget"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ArgumentError(name, value, "give a whole number, at least 1")


@dataclass(frozen=True)
class Plan:
    """A schedule for a model.

    Attributes:
        program: What each rank does.
        runs: The layers of each stage.
        seconds: Of a step, as simulated.
        peak_bytes: Most that any rank holds for micro-batches in flight, as simulated.
    """

    program: Program
    runs: tuple[range, ...]
    seconds: float
    peak_bytes: int

    @property
    def group(self) -> int:
        """Layers of the longest stage."""
        return max(len(run) for run in self.runs)


def choose(
    settings: Settings, costs: Costs, ranks: int, link: Link = Link(), *, spans: Sequence[range] | None = None
) -> Plan:
    """The fastest plan within the budget, by simulation; of those that are as fast, the one that holds least.

    Args:
        settings: What is asked for.
        costs: Of the model, as fine as they were measured.
        ranks: Devices.
        link: Between them.
        spans: Which costs belong to each layer of the model; None for one each.
    """
    settings.check()
    spans = [range(i, i + 1) for i in range(len(costs.layers))] if spans is None else spans
    layers = len(spans)
    if layers < ranks:
        raise ArgumentError("model", f"{layers} layers", f"give one for each of the {ranks} ranks at least")
    plans: list[Plan] = []
    refusals: list[GradweaveError] = []
    for policy in POLICIES if settings.policy == "auto" else (settings.policy,):
        try:
            for stages in _stage_counts(policy, settings, layers, ranks):
                plans += _plans(policy, stages, settings, costs, spans, ranks, link)
        except (ArgumentError, ScheduleError) as refusal:
            refusals.append(refusal)
    if not plans:
        raise refusals[0]
    fitting = [plan for plan in plans if settings.byte_budget is None or plan.peak_bytes <= settings.byte_budget]
    if not fitting:
        least = min(plans, key=lambda plan: plan.peak_bytes)
        raise ScheduleError(
            f"byte_budget={settings.byte_budget}: {settings.policy} holds {least.peak_bytes} bytes at least, with "
            f"{least.program.policy}; raise the budget, or give more and smaller micro-batches"
        )
    fastest = min(plan.seconds for plan in fitting)
    return min(
        (plan for plan in fitting if plan.seconds <= fastest * _AS_GOOD),
        key=lambda plan: (plan.peak_bytes, plan.seconds, len(plan.runs)),
    )


def _stage_counts(policy: str, settings: Settings, layers: int, ranks: int) -> Iterator[int]:
    """How many stages to try."""
    group = settings.group
    if policy in ONE_STAGE:
        counts = [ranks]
    elif policy in V_SHAPED:
        counts = [2 * ranks]
    elif group is None:
        counts = [ranks * each for each in range(1, layers // ranks + 1)]
    else:
        counts = [layers // group if layers % group == 0 else 0]
    for count in counts:
        if group is not None and (count % ranks or not count or layers != count * group):
            fitting = [g for g in range(1, layers // ranks + 1) if layers % (g * ranks) == 0]
            remedy = f"{layers} layers in groups of {group} do not share out evenly over {ranks} ranks with {policy}; "
            remedy += f"give a group of {', '.join(map(str, fitting))}" if fitting else "leave group out"
            raise ArgumentError("group", group, remedy)
        if count > layers:
            raise ArgumentError("model", f"{layers} layers", f"{policy} needs {count} on {ranks} ranks")
        yield count


def _plans(
    policy: str, stages: int, settings: Settings, costs: Costs, spans: Sequence[range], ranks: int, link: Link
) -> Iterator[Plan]:
    """Orders found for the link as it is, and for one that costs nothing; all are judged by the link as it is.

    What arrives a little late finds its rank busy with something long, if the order counts on its being late.
    """
    runs = cut(costs, spans, stages)
    fine = [range(spans[run[0]].start, spans[run[-1]].stop) for run in runs]
    whole = stage_costs(costs, fine)
    programs: list[Program] = []
    for assumed in dict.fromkeys((Link(), link)):
        programs += (
            make_program(
                policy, whole, ranks=ranks, microbatches=settings.microbatches, max_in_flight=cap, link=assumed
            )
            for cap in _caps(policy, settings, ranks)
        )
        if policy in OURS and settings.max_in_flight is None:
            programs += _bounded(policy, whole, stage_bytes(costs, fine), settings, ranks, assumed)
    for program in dict.fromkeys(programs):
        timeline = predict(program, costs, fine, link=link)
        yield Plan(program, tuple(runs), timeline.makespan, timeline.peak_bytes)


def _bounded(
    policy: str, costs: Sequence[LayerCost], sizes: Sequence[StageBytes], settings: Settings, ranks: int, link: Link
) -> Iterator[Program]:
    """Orders that hold less: found with less patience, and within a bound if there is one."""
    budget = settings.byte_budget
    shares = (None,) if budget is None else _SHARES
    for share in shares:
        bound = None if budget is None or share is None else int(share * budget)
        for patience in _FEW if budget is None else _MANY:
            try:
                orders = bounded_orders(
                    costs, sizes, ranks=ranks, microbatches=settings.microbatches, byte_budget=bound,
                    patience=patience, link=link,
                )  # fmt: skip
            except ScheduleError:
                continue
            yield Program(policy, tuple(tuple(order) for order in orders), settings.microbatches)


def _caps(policy: str, settings: Settings, ranks: int) -> list[int | None]:
    """Which caps to try: that of the user, or some; torch's own schedules take none."""
    if settings.max_in_flight is not None or policy not in OURS:
        return [settings.max_in_flight]
    few = range(1, ranks) if settings.byte_budget is not None else ()
    return [None, *(cap for cap in (*few, ranks, ranks + 1, 2 * ranks) if cap < settings.microbatches)]
