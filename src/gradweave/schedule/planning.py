"""Applying a policy by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradweave.errors import ArgumentError
from gradweave.schedule.graph import Family, TaskGraph
from gradweave.schedule.policies import POLICIES, Policy
from gradweave.schedule.schedule import Schedule


def policies_for(family: Family) -> list[Policy]:
    """The policies that fit a family of scenarios, plainest first."""
    return [policy for policy in POLICIES.values() if family in policy.families]


def plan(graph: TaskGraph, *, policy: str, **options: Any) -> Schedule:
    """Applies a named policy to a task graph.

    Args:
        graph: From one of the builders in :mod:`gradweave.schedule`.
        policy: A name of :data:`gradweave.schedule.POLICIES` that fits the graph's family.
        **options: What that policy takes, such as ``max_in_flight`` or ``byte_budget``.

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
