"""Shares of a device that tasks take, fitted to how long pairs of them take on two streams.

The scheduler's model has a share of the device for every task; two tasks run side by side at full speed while their
shares sum to at most 1, and slow down together beyond that. So a pair's slowdown is the sum of its shares, or 1, and
measured slowdowns give the shares.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from gradweave.profile.captured import CapturedRepeats, TaskCalls, seconds_side_by_side
from gradweave.schedule.costs import Costs
from gradweave.schedule.tasks import Demand, Kind

MOST_GROUPS = 6
"""Groups of layers that are measured together: the pairs of them take a few seconds."""
_SHARES = [number / 50 for number in range(51)]
_SWEEPS = 40

Part = tuple[Kind, int]
"""A kind of task, and a group of layers."""
UPDATE: Part = (Kind.U, 0)
"""The update of all layers, which is one call."""
_Task = TypeVar("_Task", bound=Hashable)


def with_measured_shares(
    costs: Costs,
    calls: TaskCalls,
    update: Callable[[], None] | None,
    device: torch.device,
    progress: Callable[[str, float], None] = lambda *_: None,
) -> Costs:
    """Return costs with the shares of the device that tasks take, from how groups of layers run side by side.

    The layers of a group also run one after the other as in a step, where they do not find what they read in the
    caches: costs are scaled to what that takes.

    A weight gradient is tried beside the input gradients of its own group and of those below, and beside the next
    forward of the groups below; the update of all layers beside all of these. What is not tried keeps the whole device.

    Args:
        costs: Of each task alone.
        calls: The operations of each task.
        update: Updates all layers in a way that can be captured; None if there is none.
        device: That runs them.
        progress: Told what is going on, and the share that is done.
    """
    layers = costs.layers
    groups = equal_groups([c.forward + c.input_grad + c.weight_grad for c in layers], MOST_GROUPS)
    with torch.no_grad(), torch.cuda.device(device):
        main, side = torch.cuda.Stream(), torch.cuda.Stream()
        repeats = {
            (kind, number): CapturedRepeats(partial(calls.run, kind, group), side if kind is Kind.W else main)
            for number, group in enumerate(groups)
            for kind in (Kind.F, Kind.X, Kind.W)
            if any(calls.by_task[kind, layer] for layer in group)
        }
        if update is not None:
            repeats[UPDATE] = CapturedRepeats(update, side)
        costs = scale_parts(costs, groups, {part: one.seconds_of_one for part, one in repeats.items()})
        pairs = feasible_pairs(list(repeats))
        slowdowns = {}
        for number, (one, other) in enumerate(pairs):
            progress(f"pair {number + 1} of {len(pairs)}", number / len(pairs))
            together = seconds_side_by_side(repeats[one], repeats[other])
            slowdowns[one, other] = slowdown(repeats[one].seconds, repeats[other].seconds, together)
    return with_shares(costs, groups, slowdowns)


def equal_groups(seconds: Sequence[float], most: int) -> list[range]:
    """Join neighbours to groups that take about the same time."""
    total = sum(seconds)
    groups: list[range] = []
    begin, spent = 0, 0.0
    for index, one in enumerate(seconds):
        spent += one
        is_full = spent >= total * (len(groups) + 1) / most
        if is_full or index + 1 == len(seconds):
            groups.append(range(begin, index + 1))
            begin = index + 1
    return groups


def feasible_pairs(parts: Sequence[Part]) -> list[tuple[Part, Part]]:
    """Return weight gradients and updates, each with what may run beside it.

    A weight gradient can run from the backward of its own group on, and until that group's next forward.
    """
    return [
        (one, other)
        for one in parts
        for other in parts
        if (one[0] is Kind.U and other[0] in (Kind.F, Kind.X))
        or (one[0] is Kind.W and other[0] is Kind.X and other[1] <= one[1])
        or (one[0] is Kind.W and other[0] is Kind.F and other[1] < one[1])
    ]


def slowdown(one: float, other: float, together: float) -> float:
    """Return the factor by which two tasks slow each other down while both run: from 1, not at all, to 2, no gain.

    Args:
        one: Seconds of the first alone.
        other: Seconds of the second alone.
        together: Seconds until both are done, begun at the same time.
    """
    shorter, longer = sorted((one, other))
    if shorter <= 0:
        return 2.0
    return min(2.0, max(1.0, (together - (longer - shorter)) / shorter))


def fit_shares(slowdowns: Mapping[tuple[_Task, _Task], float]) -> dict[_Task, float]:
    """Return a share for every task in the pairs, by which the slowdowns come out as nearly as possible.

    Of several shares that fit equally well it is the largest, so that no overlap is promised that was not measured.
    """
    partners: dict[_Task, list[tuple[_Task, float]]] = {}
    for (one, other), factor in slowdowns.items():
        partners.setdefault(one, []).append((other, factor))
        partners.setdefault(other, []).append((one, factor))
    shares = dict.fromkeys(partners, 1.0)
    for _ in range(_SWEEPS):
        before = dict(shares)
        for task, known in partners.items():
            shares[task] = min(_SHARES, key=lambda share: (_fit_error(share, known, shares), -share))
        if shares == before:
            break
    return shares


def _fit_error(share: float, known: Sequence[tuple[_Task, float]], shares: Mapping[_Task, float]) -> float:
    """Return the squared error of a share, rounded so that equally good ones compare as equal."""
    return round(sum((max(1.0, share + shares[other]) - factor) ** 2 for other, factor in known), 9)


def with_shares(costs: Costs, groups: Sequence[range], slowdowns: Mapping[tuple[Part, Part], float]) -> Costs:
    """Return costs in which every layer has the shares of its group, and the group is its block."""
    shares = fit_shares(slowdowns)
    layers = list(costs.layers)
    for number, group in enumerate(groups):
        of_kind = [shares.get((kind, number), 1.0) for kind in (Kind.F, Kind.X, Kind.W)]
        forward, input_grad, weight_grad, update = (
            Demand(share, share) for share in (*of_kind, shares.get(UPDATE, 1.0))
        )
        for layer in group:
            layers[layer] = replace(
                layers[layer],
                block=f"group {number}",
                forward_demand=forward,
                input_grad_demand=input_grad,
                weight_grad_demand=weight_grad,
                update_demand=update,
            )
    return replace(costs, layers=tuple(layers))


def scale_parts(costs: Costs, groups: Sequence[range], seconds: Mapping[Part, float]) -> Costs:
    """Return costs that sum up to what groups of layers, and the update of all of them, were measured to take."""
    layers = list(costs.layers)
    for (kind, number), total in seconds.items():
        field = {Kind.F: "forward", Kind.X: "input_grad", Kind.W: "weight_grad", Kind.U: "update"}[kind]
        members = range(len(layers)) if kind is Kind.U else groups[number]
        apart = sum(getattr(layers[layer], field) for layer in members)
        for layer in members if apart else ():
            layers[layer] = replace(layers[layer], **{field: getattr(layers[layer], field) * total / apart})
    return replace(costs, layers=tuple(layers))


def scale_to(costs: Costs, seconds: float | None) -> Costs:
    """Return costs whose forwards, input and weight gradients sum up to ``seconds``; the same costs if that is None."""
    apart = sum(layer.forward + layer.input_grad + layer.weight_grad for layer in costs.layers)
    if seconds is None or not apart:
        return costs
    factor = seconds / apart
    layers = [
        replace(
            layer,
            forward=factor * layer.forward,
            input_grad=factor * layer.input_grad,
            weight_grad=factor * layer.weight_grad,
        )
        for layer in costs.layers
    ]
    return replace(costs, layers=tuple(layers))
