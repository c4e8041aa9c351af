"""Gradient fast-forwarding within a bound of bytes: a weight gradient goes first where memory would run out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from gradweave.errors import ArgumentError, ScheduleError
from gradweave.schedule.graph import TaskGraph
from gradweave.schedule.lanes import Lane
from gradweave.schedule.list_scheduling import greedy
from gradweave.schedule.policies.fast_forward import admission
from gradweave.schedule.policies.modulo import round_robin
from gradweave.schedule.policies.stage_programs import check_in_flight
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.simulator import Choice
from gradweave.schedule.tasks import Kind
from gradweave.schedule.transforms import device_name, place

_INDIFFERENT = 1.005
"""Schedules within this of the fastest count as fast; the one that holds least is taken."""
SHARES = (1.0, 0.93, 0.86, 0.8, 0.65, 0.5, 0.35, 0.2)
"""Parts of the budget for what a device starts by itself, largest first."""
_UNBOUNDED = 1 << 62


class Backlog(NamedTuple):
    """How many weight gradients may wait on a device before one of them goes ahead of other work.

    Attributes:
        first: On the first device.
        more: How many more on each next device, whose gap at the end of a step is longer.
        before_inputs: Whether one goes ahead of input gradients too, or only of forwards.
    """

    first: int
    more: int = 0
    before_inputs: bool = False


_FEW_WAIT = (Kind.U, Kind.X, Kind.F, Kind.W)
_MANY_WAIT = {True: (Kind.U, Kind.W, Kind.X, Kind.F), False: (Kind.U, Kind.X, Kind.W, Kind.F)}
"""By whether weight gradients go ahead of input gradients too."""

ENDLESS = Backlog(_UNBOUNDED)
"""Weight gradients only fill gaps, as in fast_forward."""
THRIFTIEST = Backlog(0, before_inputs=True)
"""Weight gradients run as soon as they can."""
BACKLOGS = (
    ENDLESS,
    *(Backlog(first, more, before) for first in (0, 1, 2, 4) for more in (0, 1, 2) for before in (False, True)),
)


def memory_bounded(
    graph: TaskGraph,
    *,
    group: int = 1,
    max_in_flight: int | None = None,
    byte_budget: int | None = None,
    backlog: Backlog | None = None,
    share: float | None = None,
) -> Schedule:
    """Like modulo, but run weight gradients first where bytes run out or too many of them wait.

    Micro-batches go in rounds of as many as there are devices, one run of layers after the other, so that a device is
    seldom without work. Of all that is tried, the fastest schedule within ``byte_budget`` is taken; among those that
    are about as fast, the one that holds least.

    Args:
        graph: An unplaced pipeline graph.
        group: Neighbouring layers that stay together.
        max_in_flight: As for fast_forward.
        byte_budget: Most bytes that a device may hold (default: no bound).
        backlog: How many weight gradients may wait (default: found by simulation).
        share: Part of the budget for what a device starts by itself; the gradients that others send to it come on top
            (default: the largest that keeps to the budget).
    """
    check_in_flight(max_in_flight)
    if byte_budget is not None and byte_budget < 1:
        raise ArgumentError("byte_budget", byte_budget, "give a positive number of bytes")
    graph = place(graph, round_robin(graph, group))
    urgency = _urgency(graph, group)

    def scheduled(bound: int, cap: int | None, backlog: Backlog) -> Schedule:
        waits = (*_inputs_before_weights(graph), *admission(graph, cap))
        return greedy(graph, urgency, waits=waits, choose=_rule(graph, group, bound, backlog), policy="memory_bounded")

    backlogs = BACKLOGS if backlog is None else (backlog,)
    if byte_budget is None:
        attempts = [(_UNBOUNDED, max_in_flight, backlogs)]
    elif share is not None:
        attempts = [(int(share * byte_budget), max_in_flight, backlogs)]
    else:
        least = scheduled(_UNBOUNDED, 1, THRIFTIEST).simulate().peak_bytes
        if least > byte_budget:
            raise ArgumentError("byte_budget", byte_budget, f"give at least {least}: one micro-batch holds as much")
        caps = range(min(graph.cluster.devices, max_in_flight or graph.microbatches), 0, -1)
        attempts = [(int(share * byte_budget), max_in_flight, backlogs) for share in SHARES]
        attempts += [(_UNBOUNDED, cap, (THRIFTIEST,)) for cap in caps]
    for bound, cap, tries in attempts:
        candidates: dict[tuple[Lane, ...], Schedule] = {}
        for tried in tries:
            with suppress(ScheduleError):  # the bound lets nothing start
                candidate = scheduled(bound, cap, tried)
                candidates[candidate.lanes] = candidate
        fastest = _fastest(candidates.values(), byte_budget)
        if fastest is not None:
            return fastest
    raise ArgumentError("byte_budget", byte_budget, "no order was found that keeps to it; raise it")


def _inputs_before_weights(graph: TaskGraph) -> Iterator[tuple[int, int]]:
    """Let each weight gradient wait for its layer's input gradient, which other devices may wait for."""
    index = graph.index
    for (kind, layer, microbatch, step), task in index.items():
        if kind is Kind.W:
            yield task, index[Kind.X, layer, microbatch, step]


def _urgency(graph: TaskGraph, group: int) -> list[tuple[int, ...]]:
    """Return the order among tasks of one kind: rounds of micro-batches, in each run by run."""
    devices = graph.cluster.devices
    urgency: list[tuple[int, ...]] = []
    for task in graph.tasks:
        towards_output = 1 if task.kind is Kind.F else -1
        run = task.layer // group
        urgency.append(
            (task.step, task.microbatch // devices, towards_output * run, task.microbatch, towards_output * task.layer)
        )
    return urgency


def _rule(graph: TaskGraph, group: int, bound: int, backlog: Backlog) -> Choice:
    """Return the rule by which an idle device chooses among its ready tasks."""
    limits = {
        device_name(number): group * (backlog.first + backlog.more * number)
        for number in range(graph.cluster.devices)
    }  # fmt: skip
    kinds = [task.kind for task in graph.tasks]

    def choose(device: str, ready: Sequence[int], bytes_once_started: Callable[[int], int]) -> int | None:
        first: dict[Kind, int] = {}
        waiting = 0
        for task in ready:
            first.setdefault(kinds[task], task)
            waiting += kinds[task] is Kind.W
        preferences = _FEW_WAIT if waiting <= limits[device] else _MANY_WAIT[backlog.before_inputs]
        for kind in preferences:
            if kind not in first:
                continue
            fits = kind in (Kind.U, Kind.W) or bytes_once_started(first[kind]) <= bound
            # An input gradient that does not fit, and has no weight gradient to make room for it, must run some time.
            if fits or (kind is Kind.X and not waiting):
                return first[kind]
        return None

    return choose


def _fastest(schedules: Iterable[Schedule], byte_budget: int | None) -> Schedule | None:
    """Return the fastest schedule within a budget; of those that are about as fast, the one that holds least."""
    fitting = []
    for schedule in schedules:
        timeline = schedule.simulate()
        if byte_budget is None or timeline.peak_bytes <= byte_budget:
            fitting.append((timeline.peak_bytes, timeline.makespan, schedule))
    fastest = min((seconds for _, seconds, _ in fitting), default=0.0)
    as_fast = [found for found in fitting if found[1] <= fastest * _INDIFFERENT]
    return min(as_fast, key=lambda found: found[:2])[2] if as_fast else None
