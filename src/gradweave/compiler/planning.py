"""The schedule that a compiled step runs by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch

from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.schedule.builders import single
from gradweave.schedule.calls import step_call
from gradweave.schedule.costs import Costs
from gradweave.schedule.graph import Family
from gradweave.schedule.policies import plan
from gradweave.schedule.schedule import Schedule

OneDevicePolicy = Literal[
    "in_order", "backward_fusion", "forward_fusion", "side_stream", "joint", "cross_step", "side_region"
]
"""The policies for one device, by name."""
StepPolicy = OneDevicePolicy | Literal["auto"] | Schedule
"""The order of a compiled step; ``"auto"`` leaves it to the compiler."""

DECIDED_BY_COSTS = ("joint", "cross_step", "side_region")
"""Policies whose order depends on what tasks cost; that of others depends on the layers alone."""

WORTH_IT = 0.03
"""Share of a step's time that must be won, by prediction, before a graph is cut: that has a price of its own."""


def check_policy(policy: object) -> None:
    """Raise ArgumentError for what is no policy for one device."""
    names = get_args(OneDevicePolicy)
    if isinstance(policy, Schedule):
        if policy.graph.family is not Family.SINGLE:
            raise ArgumentError("policy", policy.policy, f"is for {policy.graph.family}; plan one for one device")
    elif policy != "auto" and policy not in names:
        raise ArgumentError("policy", policy, f'use "auto", a Schedule for one device, or one of {", ".join(names)}')


def may_leave_work(policy: StepPolicy) -> bool:
    """Return whether steps by a policy may leave work to the next one."""
    if isinstance(policy, Schedule):
        return step_call(policy).carries
    return policy in ("forward_fusion", "cross_step")


def schedule_for(
    policy: StepPolicy, costs: Costs | None, layers: Sequence[str], device: torch.device
) -> Schedule | None:
    """Return the schedule of a step; None if the compiler's order stays.

    Args:
        policy: As for :func:`gradweave.compile`.
        costs: Measured of the model; None if they are not known.
        layers: Names of the step's layers.
        device: That runs the step; a CPU has one stream.
    """
    if isinstance(policy, Schedule):
        _check_layers(policy.graph.costs, layers, f"a schedule for {policy.graph.costs.name}")
        return policy
    if costs is not None:
        _check_layers(costs, layers, f"costs of {costs.name}")
    if policy == "auto":
        return None if costs is None or device.type != "cuda" else _side_region_if_it_pays(costs)
    if costs is None:
        if policy in DECIDED_BY_COSTS:
            raise ArgumentError("policy", policy, "is planned from costs; give those of measure_costs()")
        uniform = Costs.uniform(len(layers))
        named = tuple(replace(layer, name=name) for layer, name in zip(uniform.layers, layers, strict=True))
        costs = Costs(named, name="layers of one cost")
    return plan(single(costs, steps=2), policy=policy)


def _side_region_if_it_pays(costs: Costs) -> Schedule | None:
    graph = single(costs, steps=2)
    best = plan(graph, policy="side_region")
    stock = plan(graph, policy="in_order")
    return best if best.simulate().step_time <= (1 - WORTH_IT) * stock.simulate().step_time else None


def _check_layers(costs: Costs, layers: Sequence[str], subject: str) -> None:
    names = [layer.name for layer in costs.layers]
    if len(names) != len(layers) or any(ours and ours != theirs for ours, theirs in zip(layers, names, strict=True)):
        raise UnsupportedError(subject, "the compiled model has other layers", "measure its own costs")
