from typing import get_args

import pytest

from gradweave.errors import ArgumentError
from gradweave.schedule import POLICIES, Costs, Family, PolicyName, pipeline, plan, single
from gradweave.schedule.policies import policies_for


def test_policies_are_applied_by_name_with_their_options():
    graph = pipeline(Costs.uniform(8), stages=2, microbatches=4)
    schedule = plan(graph, policy="modulo", group=2)
    assert schedule.policy == "modulo"
    assert [task.resource for task in schedule.graph.tasks[:8]] == ["gpu0", "gpu0", "gpu1", "gpu1"] * 2


def test_mistakes_are_named_with_what_would_work():
    graph = single(Costs.uniform(2))
    with pytest.raises(ArgumentError, match=r"policy='fast'.*unknown.*in_order"):
        plan(graph, policy="fast")
    with pytest.raises(ArgumentError, match=r"policy='gpipe'.*does not fit a single graph; use one of in_order"):
        plan(graph, policy="gpipe")
    with pytest.raises(ArgumentError, match=r"group=2: is no option of joint; it takes byte_budget"):
        plan(graph, policy="joint", group=2)
    with pytest.raises(ArgumentError, match=r"k=2: is no option of in_order; it takes none"):
        plan(graph, policy="in_order", k=2)


def test_every_family_has_policies_and_every_policy_a_family():
    fitting = {policy.name for family in Family for policy in policies_for(family)}
    assert fitting == set(POLICIES)
    assert all(policies_for(family) for family in Family)


def test_the_type_of_names_lists_every_policy():
    assert get_args(PolicyName) == tuple(POLICIES)
