"""The policies by name, and ``plan()``, which applies one.

A policy is a function from a task graph (and keyword options) to a schedule. To add one: a file here, its name and a
line in the table below, and a row in its test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from gradweave.errors import ArgumentError
from gradweave.schedule.graph import Family, TaskGraph
from gradweave.schedule.policies.backward_fusion import backward_fusion
from gradweave.schedule.policies.cross_step import cross_step
from gradweave.schedule.policies.daso import daso
from gradweave.schedule.policies.ddp import ddp
from gradweave.schedule.policies.fast_forward import fast_forward
from gradweave.schedule.policies.forward_fusion import forward_fusion
from gradweave.schedule.policies.gpipe import gpipe
from gradweave.schedule.policies.in_order import in_order
from gradweave.schedule.policies.interleaved import interleaved
from gradweave.schedule.policies.joint import joint
from gradweave.schedule.policies.memory_bounded import memory_bounded
from gradweave.schedule.policies.modulo import modulo
from gradweave.schedule.policies.no_barrier import no_barrier
from gradweave.schedule.policies.one_f_one_b import one_f_one_b
from gradweave.schedule.policies.priority import priority
from gradweave.schedule.policies.reverse_first_k import reverse_first_k
from gradweave.schedule.policies.side_region import side_region
from gradweave.schedule.policies.side_stream import side_stream
from gradweave.schedule.policies.zb_h1 import zb_h1
from gradweave.schedule.schedule import Schedule

_SINGLE = (Family.SINGLE,)
_REPLICAS = (Family.DATA_PARALLEL, Family.HIERARCHICAL)
_PIPELINE = (Family.PIPELINE,)

PolicyName = Literal[
    "in_order",
    "backward_fusion",
    "forward_fusion",
    "side_stream",
    "joint",
    "cross_step",
    "side_region",
    "ddp",
    "no_barrier",
    "reverse_first_k",
    "priority",
    "daso",
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "zb_h1",
    "fast_forward",
    "modulo",
    "memory_bounded",
]


@dataclass(frozen=True)
class Policy:
    """A policy and the scenarios it fits."""

    function: Callable[..., Schedule]
    families: tuple[Family, ...]

    @property
    def name(self) -> PolicyName:
        """The name by which :func:`plan` knows it."""
        return cast(PolicyName, self.function.__name__)

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options it takes."""
        return tuple(inspect.signature(self.function).parameters)[1:]


POLICIES: dict[PolicyName, Policy] = {
    policy.name: policy
    for policy in (
        Policy(in_order, _SINGLE),
        Policy(backward_fusion, _SINGLE),
        Policy(forward_fusion, _SINGLE),
        Policy(side_stream, _SINGLE),
        Policy(joint, _SINGLE),
        Policy(cross_step, _SINGLE),
        Policy(side_region, _SINGLE),
        Policy(ddp, _REPLICAS),
        Policy(no_barrier, _REPLICAS),
        Policy(reverse_first_k, _REPLICAS),
        Policy(priority, _REPLICAS),
        Policy(daso, (Family.HIERARCHICAL,)),
        Policy(gpipe, _PIPELINE),
        Policy(one_f_one_b, _PIPELINE),
        Policy(interleaved, _PIPELINE),
        Policy(zb_h1, _PIPELINE),
        Policy(fast_forward, _PIPELINE),
        Policy(modulo, _PIPELINE),
        Policy(memory_bounded, _PIPELINE),
    )
}


def policies_for(family: Family) -> list[Policy]:
    """Return the policies that fit a family of scenarios, plainest first."""
    return [policy for policy in POLICIES.values() if family in policy.families]


def plan(graph: TaskGraph, *, policy: PolicyName, **options: Any) -> Schedule:
    """Apply a policy to a task graph.

    Args:
        graph: From one of the builders in :mod:`gradweave.schedule`.
        policy: A name of :data:`gradweave.schedule.POLICIES` that fits the graph's family.
        **options: The policy's own options, such as ``max_in_flight`` or ``byte_budget``.

    Returns:
        A schedule; ``.simulate()`` predicts its timeline.
    """
    fitting = ", ".join(known.name for known in policies_for(graph.family))
    if policy not in POLICIES:
        raise ArgumentError("policy", policy, f"is unknown; for a {graph.family} graph use one of {fitting}")
    chosen = POLICIES[policy]
    if graph.family not in chosen.families:
        raise ArgumentError("policy", policy, f"does not fit a {graph.family} graph; use one of {fitting}")
    for option in options:
        if option not in chosen.options:
            known = ", ".join(chosen.options) or "none"
            raise ArgumentError(option, options[option], f"is no option of {policy}; it takes {known}")
    schedule = chosen.function(graph, **options)
    return replace(schedule, options={**options, **schedule.options})
