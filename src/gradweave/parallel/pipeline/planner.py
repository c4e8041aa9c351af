"""Plans: the schedule, the number of stages and the cap on micro-batches in flight, chosen by simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from gradweave.errors import ArgumentError, GradweaveError, ScheduleError, UnsupportedError
from gradweave.parallel.pipeline.partition import UNKNOWN, cut, stage_graph
from gradweave.parallel.pipeline.programs import (
    ONE_STAGE,
    POLICIES,
    TORCHS,
    V_SHAPED,
    PipelinePolicy,
    Program,
    make_program,
)
from gradweave.schedule import Costs
from gradweave.schedule.links import Link
from gradweave.schedule.policies.memory_bounded import BACKLOGS, ENDLESS, SHARES, THRIFTIEST, Backlog

Split = Literal["fast", "torch"]
SPLITS: tuple[str, ...] = get_args(Split)

_AS_GOOD = 1.005
"""Plans within this of the fastest count as fast; the one with the least memory is taken."""
_FEW_BACKLOGS = (Backlog(0, 1), Backlog(0, 2, True), Backlog(1, 1), Backlog(4, 0, True))
"""Of them those that often hold less in the same time, for where no budget asks for more."""
_LENIENT_SHARES = SHARES[:4]
"""Of the budget, for orders found without counting gradients that were sent and wait for their X."""
_BOUNDED = "memory_bounded"
"""The policy that is tried along with gradweave's others, which only fill gaps with weight gradients."""


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

    policy: PipelinePolicy
    microbatches: int
    group: int | None = None
    max_in_flight: int | None = None
    byte_budget: int | None = None
    split: Split = "fast"

    def check(self) -> None:
        """Raise ArgumentError for what no pipeline could do."""
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
        reason: Why it was chosen.
    """

    program: Program
    runs: tuple[range, ...]
    seconds: float
    peak_bytes: int
    reason: str = ""

    @property
    def group(self) -> int:
        """Layers of the longest stage."""
        return max(len(run) for run in self.runs)

    def explain(self) -> str:
        """Return what was planned, what it is predicted to take, and why it was chosen."""
        program = self.program
        cap = "" if program.max_in_flight is None else f", at most {program.max_in_flight} in flight"
        return (
            f"{program.policy}: {len(self.runs)} stages of up to {self.group} layers on {len(program.ranks)} ranks, "
            f"{program.microbatches} micro-batches{cap}; predicted {self.seconds:.4g} s a step and at most "
            f"{self.peak_bytes:,} bytes for micro-batches in flight on a rank; {self.reason}"
        )


def choose(
    settings: Settings, costs: Costs, ranks: int, link: Link = Link(), *, spans: Sequence[range] | None = None
) -> Plan:
    """Return the fastest plan within the budget, by simulation; of those that are as fast, the one that holds least.

    Args:
        settings: What is asked for.
        costs: Of the model, as fine as they were measured.
        ranks: Number of devices.
        link: Between them.
        spans: The costs of each layer of the model; None for one each.
    """
    settings.check()
    spans = [range(i, i + 1) for i in range(len(costs.layers))] if spans is None else spans
    layers = len(spans)
    if layers < ranks:
        raise UnsupportedError(
            f"a model of {layers} layers", f"there are {ranks} ranks", "give at least one layer for each rank"
        )
    plans: list[Plan] = []
    refusals: list[GradweaveError] = []
    for policy in _policies(settings):
        try:
            for stages in _stage_counts(policy, settings, layers, ranks):
                plans += _plans(policy, stages, settings, costs, spans, ranks, link, refusals)
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
    chosen = min(
        (plan for plan in fitting if plan.seconds <= fastest * _AS_GOOD),
        key=lambda plan: (plan.peak_bytes, plan.seconds, len(plan.runs)),
    )
    return replace(chosen, reason=_reason(settings, costs, plans, fitting))


def _reason(settings: Settings, costs: Costs, plans: Sequence[Plan], fitting: Sequence[Plan]) -> str:
    """Return why a plan is chosen among those that were simulated."""
    best: dict[str, float] = {}
    for plan in fitting:
        name = plan.program.policy
        best[name] = min(plan.seconds, best.get(name, plan.seconds))
    told = ", ".join(f"{name} {seconds:.4g} s" for name, seconds in sorted(best.items(), key=lambda one: one[1]))
    budget = settings.byte_budget
    within = "" if budget is None else f", of which {len(fitting)} keep to byte_budget={budget:,}"
    unknown = "; without costs=, each of a layer's tasks counts as 1 s and no bytes" if costs.source == UNKNOWN else ""
    return (
        f"policy={settings.policy!r}: the least bytes among the fastest of {len(plans)} simulated plans{within} "
        f"(best of each policy: {told}){unknown}"
    )


def _policies(settings: Settings) -> tuple[str, ...]:
    """Return the policies to try; the bounded one is tried with others."""
    if settings.policy != "auto":
        return (settings.policy,)
    return tuple(policy for policy in POLICIES if policy != _BOUNDED)


def _stage_counts(policy: str, settings: Settings, layers: int, ranks: int) -> Iterator[int]:
    """Return the numbers of stages to try."""
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
            raise UnsupportedError(
                f"a model of {layers} layers", f"{policy} needs {count} on {ranks} ranks", "use another policy"
            )
        yield count


def _plans(
    policy: str,
    stages: int,
    settings: Settings,
    costs: Costs,
    spans: Sequence[range],
    ranks: int,
    link: Link,
    refusals: list[GradweaveError],
) -> Iterator[Plan]:
    """Return plans whose orders were found for the link as it is and for a free one; the real link judges all of them.

    An order found for a slow link may count on a message that comes late: its rank does something long meanwhile. Where
    the message costs little, the order found for a free link, which takes it as soon as it comes, is the better one.
    """
    runs = cut(costs, spans, stages)
    fine = [range(spans[run[0]].start, spans[run[-1]].stop) for run in runs]
    programs: dict[tuple[Any, ...], Program] = {}
    for assumed in dict.fromkeys((Link(), link)):
        exact, lenient = (
            stage_graph(
                costs, fine, ranks=ranks, microbatches=settings.microbatches, link=assumed, counts_arrivals=counts
            )
            for counts in (True, False)
        )
        for name, options in _variants(policy, settings, ranks):
            try:
                program = make_program(name, lenient if options.get("share") in _LENIENT_SHARES else exact, **options)
            except ArgumentError as refusal:
                if name != _BOUNDED:
                    raise
                refusals.append(refusal)  # another variant may keep to the budget
            else:
                programs.setdefault(program.ranks, program)
    for program in programs.values():
        timeline = program.predict(costs, fine, link=link)
        yield Plan(program, tuple(runs), timeline.makespan, timeline.peak_bytes)


def _variants(policy: str, settings: Settings, ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the policies to try for the one that was asked for, with their options."""
    cap, budget = settings.max_in_flight, settings.byte_budget
    if policy in TORCHS:
        yield policy, {} if cap is None else {"max_in_flight": cap}
        return
    few = range(1, ranks) if budget is not None else ()
    caps = [other for other in (*few, ranks, ranks + 1, 2 * ranks) if other < settings.microbatches]
    if policy != _BOUNDED:
        yield from ((policy, {"max_in_flight": other}) for other in ([None, *caps] if cap is None else [cap]))
        if cap is not None:
            return
    if budget is None:
        yield from ((_BOUNDED, {"max_in_flight": cap, "backlog": backlog}) for backlog in (ENDLESS, *_FEW_BACKLOGS))
        return
    yield _BOUNDED, {"max_in_flight": cap, "byte_budget": budget}
    for share in _LENIENT_SHARES:
        for backlog in BACKLOGS:
            yield _BOUNDED, {"max_in_flight": cap, "byte_budget": budget, "backlog": backlog, "share": share}
    for other in caps:
        if cap is None or other <= cap:
            yield _BOUNDED, {"max_in_flight": other, "backlog": THRIFTIEST}
