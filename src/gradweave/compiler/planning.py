"""The schedule that a compiled step runs by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch

from gradweave._runtime.buckets import MESSAGE_BYTES
from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.schedule.builders import data_parallel, single
from gradweave.schedule.calls import step_call
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.graph import Family
from gradweave.schedule.links import Link
from gradweave.schedule.list_scheduling import link_lanes
from gradweave.schedule.policies import plan
from gradweave.schedule.policies.no_barrier import unbarriered_stream
from gradweave.schedule.policies.reverse_first_k import held_back as held_back_schedule
from gradweave.schedule.schedule import Schedule
from gradweave.schedule.transforms import merge_messages

OneDevicePolicy = Literal[
    "in_order", "backward_fusion", "forward_fusion", "side_stream", "joint", "cross_step", "side_region"
]
"""The policies for one device, by name."""
RanksPolicy = Literal["ddp", "no_barrier", "reverse_first_k"]
"""The policies for replicas of a model, by name."""
StepPolicy = OneDevicePolicy | RanksPolicy | Literal["auto"] | Schedule
"""The order of a compiled step; ``"auto"`` leaves it to the compiler."""

DECIDED_BY_COSTS = ("joint", "cross_step", "side_region")
"""Policies whose order depends on what tasks cost; that of others depends on the layers alone."""

WORTH_IT = 0.03
"""Share of a step's time that must be won, by prediction, before a graph is cut: that has a price of its own."""


def check_policy(policy: object, *, averages: bool) -> None:
    """Raise ArgumentError for what is no policy for one device, or for ranks that average gradients."""
    if isinstance(policy, Schedule):
        if policy.graph.family is not Family.SINGLE or averages:
            raise ArgumentError(
                "policy", policy.policy, "give a Schedule for one device, without a mesh, or the name of a policy"
            )
        return
    names = get_args(RanksPolicy if averages else OneDevicePolicy)
    if policy != "auto" and policy not in names:
        where = "with a mesh of several ranks" if averages else "on one device"
        raise ArgumentError("policy", policy, f'{where} use "auto" or one of {", ".join(names)}')


def may_leave_work(policy: StepPolicy) -> bool:
    """Return whether steps by a policy may leave work to the next one."""
    if isinstance(policy, Schedule):
        return step_call(policy).carries
    return policy in ("forward_fusion", "cross_step", "no_barrier", "reverse_first_k")


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
    if costs is not None and (policy == "auto" or policy in DECIDED_BY_COSTS):
        _check_layers(costs, layers, f"costs of {costs.name}")
    if policy == "auto":
        return None if costs is None or device.type != "cuda" else _side_region_if_it_pays(costs)
    if costs is None and policy in DECIDED_BY_COSTS:
        raise ArgumentError("policy", policy, "is planned from costs; give those of measure_costs()")
    known = costs if policy in DECIDED_BY_COSTS and costs is not None else _uniform(layers)
    return plan(single(known, steps=2), policy=policy)


def schedule_for_ranks(
    policy: RanksPolicy, layers: Sequence[str], messages: Sequence[Sequence[int]], held_back: int, ranks: int
) -> Schedule:
    """Return the schedule of a step that averages gradients; its order depends on the messages alone.

    Args:
        policy: The policy.
        layers: Names of the step's layers.
        messages: Layers of each message, in the order of sending.
        held_back: Number of first layers whose messages are sent at the end of backward.
        ranks: Number of replicas.
    """
    sent = [layer for message in messages for layer in message]
    in_order = all(sorted(message) == list(range(min(message), max(message) + 1)) for message in messages)
    late = [layer for message in messages for layer in message if layer < held_back]
    if not in_order or sorted(sent) != list(range(len(layers))) or (held_back and len(late) != held_back):
        raise UnsupportedError(
            f"policy={policy!r}",
            "layers that share a message are not used one after the other, or a layer has none",
            'use policy="ddp"',
        )
    graph = merge_messages(data_parallel(_uniform(layers), replicas=ranks, link=Link(1.0), steps=2), messages)
    if policy == "reverse_first_k":
        return held_back_schedule(graph, held_back)
    lanes = (unbarriered_stream(graph), *link_lanes(graph))
    return Schedule(graph, lanes, policy=policy)


def best_held_back(costs: Costs, link: Link, ranks: int) -> int:
    """Return the number of first layers to hold back that is best by simulation."""
    graph = data_parallel(costs, replicas=ranks, link=link, steps=3)
    return int(plan(graph, policy="reverse_first_k", bucket_bytes=MESSAGE_BYTES).options["k"])


def costs_of_layers(measured: Costs, layers: Sequence[str]) -> Costs:
    """Return measured costs for the layers that a step has now: some may be frozen since, or thawed.

    A layer that was not measured is taken for the mean of the others.
    """
    names = [layer.name for layer in measured.layers]
    if list(layers) == names:
        return measured
    known = dict(zip(names, measured.layers, strict=True))
    count = len(measured.layers)
    mean = LayerCost(
        "", *(sum(getattr(layer, part) for layer in measured.layers) / count
              for part in ("forward", "input_grad", "weight_grad", "update"))
    )  # fmt: skip
    return replace(measured, layers=tuple(known.get(name, replace(mean, name=name)) for name in layers))


def _uniform(layers: Sequence[str]) -> Costs:
    uniform = Costs.uniform(len(layers))
    named = tuple(replace(layer, name=name) for layer, name in zip(uniform.layers, layers, strict=True))
    return Costs(named, name="layers of one cost")


def _side_region_if_it_pays(costs: Costs) -> Schedule | None:
    graph = single(costs, steps=2)
    best = plan(graph, policy="side_region")
    stock = plan(graph, policy="in_order")
    return best if best.simulate().step_time <= (1 - WORTH_IT) * stock.simulate().step_time else None


def _check_layers(costs: Costs, layers: Sequence[str], subject: str) -> None:
    names = [layer.name for layer in costs.layers]
    if len(names) != len(layers) or any(ours and ours != theirs for ours, theirs in zip(layers, names, strict=True)):
        raise UnsupportedError(subject, "the compiled model has other layers", "measure its own costs")
