"""Every policy, one row each: valid schedules within bounds on any scenario it fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave.errors import GradweaveError
from gradweave.schedule import POLICIES, Costs, Family, Link, data_parallel, hierarchical, pipeline, plan, single
from gradweave.schedule.policies.memory_bounded import Backlog
from schedule.strategies import graphs

EPSILON = 1e-9
CAPS = {"max_in_flight": st.integers(1, 6)}
BUCKETS = {"bucket_bytes": st.integers(0, 200)}
BUDGET = {"byte_budget": st.integers(1, 1500)}

# policy: random values for each of its options
TABLE = {
    "in_order": {},
    "backward_fusion": {},
    "forward_fusion": {},
    "side_stream": {},
    "joint": BUDGET,
    "cross_step": BUDGET,
    "side_region": {"first": st.integers(0, 9)},
    "ddp": BUCKETS,
    "no_barrier": BUCKETS,
    "reverse_first_k": {"k": st.integers(0, 9), **BUCKETS, **BUDGET},
    "priority": BUCKETS,
    "daso": {
        "every": st.integers(1, 4),
        "wait": st.integers(0, 4),
        "payload": st.sampled_from(["float32", "bfloat16"]),
    },
    "gpipe": CAPS,
    "one_f_one_b": CAPS,
    "interleaved": {"chunks": st.integers(1, 3), **CAPS},
    "zb_h1": CAPS,
    "fast_forward": CAPS,
    "modulo": {"group": st.integers(1, 3), **CAPS},
    "memory_bounded": {
        "group": st.integers(1, 3),
        **CAPS,
        **BUDGET,
        "backlog": st.builds(Backlog, st.integers(0, 4), st.integers(0, 2), st.booleans()),
        "share": st.floats(0.1, 1.0),
    },
}
CASES = [(name, family) for name in TABLE for family in POLICIES[name].families]


def test_the_table_has_a_row_for_every_policy_and_option():
    assert {name: tuple(options) for name, options in TABLE.items()} == {
        policy.name: policy.options for policy in POLICIES.values()
    }


@pytest.mark.parametrize(("name", "family"), CASES)
@given(data=st.data())
def test_a_valid_schedule_within_bounds_or_a_clear_error(name, family, data):
    graph = data.draw(graphs(family))
    options = {option: data.draw(values) for option, values in TABLE[name].items() if data.draw(st.booleans())}
    budget = options.get("byte_budget")
    try:
        schedule = plan(graph, policy=name, **options)
    except GradweaveError as error:
        # Only an option may be at fault; every graph can be scheduled with the defaults.
        fixed = ("microbatches", "chunks", "group", "steps")
        named = [option for option in (*options, *fixed) if str(error).startswith(f"{option}=")]
        assert named, error  # noqa: PT017
        return
    timeline = schedule.simulate(byte_budget=budget)
    rewritten = schedule.graph
    assert schedule.policy == name
    assert timeline.makespan >= rewritten.critical_path * (1 - EPSILON)
    assert timeline.makespan <= rewritten.serial_seconds * (1 + EPSILON)
    work: dict[str, float] = {}
    for task in rewritten.tasks:
        work[task.resource] = work.get(task.resource, 0.0) + task.seconds
    for resource, seconds in work.items():
        streams = sum(lane.resource == resource for lane in schedule.lanes)
        assert timeline.makespan >= seconds / streams * (1 - EPSILON)
    assert timeline.step_time <= timeline.makespan * (1 + EPSILON)
    assert all(points[-1][1] == 0 for points in timeline.memory.values())


SCENARIOS = {
    Family.SINGLE: single(Costs.uniform(6), steps=2),
    Family.DATA_PARALLEL: data_parallel(Costs.uniform(6), replicas=4, link=Link(1.0), steps=2),
    Family.PIPELINE: pipeline(Costs.uniform(8), stages=2, microbatches=4),
    Family.HIERARCHICAL: hierarchical(Costs.uniform(6), nodes=2, local_ranks=2, link=Link(1.0), steps=9),
}


@pytest.mark.parametrize(("name", "family"), CASES)
def test_the_defaults_work_on_an_ordinary_scenario(name, family):
    timeline = plan(SCENARIOS[family], policy=name).simulate()
    assert timeline.title == name


@pytest.mark.parametrize("name", TABLE)
def test_every_policy_says_in_a_line_what_it_does(name):
    assert POLICIES[name].summary.endswith(".")
    assert len(POLICIES[name].summary) <= 110
