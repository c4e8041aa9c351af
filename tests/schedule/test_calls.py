"""What one call of a step runs of a schedule: every task once, and in an order that the schedule allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave.errors import ScheduleError
from gradweave.schedule import Costs, Demand, Kind, Lane, LayerCost, Schedule, plan, single
from gradweave.schedule.calls import issue_order, step_call
from schedule.strategies import costs

POLICIES = ("in_order", "backward_fusion", "forward_fusion", "side_stream", "joint", "cross_step", "side_region")
HALF = Demand(0.5, 0.5)


def layers(count, **seconds):
    demands = {f"{part}_demand": HALF for part in ("forward", "input_grad", "weight_grad", "update")}
    one = {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0, "update": 0.5} | seconds
    return Costs(tuple(LayerCost(f"{i}", **one, **demands) for i in range(count)))


def shown(call):
    return " ".join(f"{'~' * slot.carried}{slot.task.kind}{slot.task.layer}" for slot in call.slots)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("in_order", "F0 F1 F2 W2 X2 W1 X1 W0 X0 U0 U1 U2"),
        ("backward_fusion", "F0 F1 F2 W2 X2 U2 W1 X1 U1 W0 X0 U0"),
        ("forward_fusion", "~U0 F0 ~U1 ~U2 F1 F2 W2 X2 W1 X1 W0 X0"),
        ("side_stream", "F0 F1 F2 X2 W2 X1 W1 X0 W0 U0 U1 U2"),
    ],
)
def test_a_call_begins_before_its_forward_and_ends_before_the_next_one(policy, order):
    call = step_call(plan(single(layers(3), steps=2), policy=policy))
    assert shown(call) == order
    assert call.carries == ("~" in order)


@given(costs(max_layers=5), st.sampled_from(POLICIES), st.integers(1, 3), st.booleans())
def test_every_task_once_and_after_what_it_waits_for(network, policy, steps, next_forward):
    schedule = plan(single(network, steps=steps, next_forward=next_forward), policy=policy)
    call = step_call(schedule)
    tasks = [(slot.task.kind, slot.task.layer) for slot in call.slots]
    assert sorted(tasks) == sorted((kind, layer) for kind in "FXWU" for layer in range(len(network.layers)))
    assert all(earlier < slot for slot, earlier in call.waits)
    assert all(call.slots[slot].carried == call.slots[earlier].carried or not call.slots[slot].carried
               for slot, earlier in call.waits)  # fmt: skip
    assert not any(slot.carried and slot.task.kind in "FX" for slot in call.slots)


@given(costs(max_layers=4), st.sampled_from(POLICIES), st.integers(1, 3))
def test_calls_in_a_row_are_the_schedule(network, policy, steps):
    """The tasks of call after call, with what is carried one step late, are in an order that all lanes allow."""
    schedule = plan(single(network, steps=steps), policy=policy)
    call, graph = step_call(schedule), schedule.graph
    ran = []
    for step in range(steps + 1):
        for slot in call.slots:
            task = graph.index.get((slot.task.kind, slot.task.layer, 0, step - slot.carried))
            ran += [] if task is None else [task]
    assert sorted(ran) == list(range(len(graph.tasks)))
    place = {task: number for number, task in enumerate(ran)}
    assert all(place[need] < place[task] for task, needs in enumerate(graph.needs) for need in needs)


@given(costs(max_layers=5), st.sampled_from(POLICIES))
def test_the_order_of_issue_is_one_that_every_lane_allows(network, policy):
    schedule = plan(single(network, steps=2), policy=policy)
    place = {task: number for number, task in enumerate(issue_order(schedule))}
    assert len(place) == len(schedule.graph.tasks)
    for lane in schedule.lanes:
        assert [place[task] for task in lane.tasks] == sorted(place[task] for task in lane.tasks)
    for task, earlier in schedule.waits:
        assert place[earlier] < place[task]


def test_a_task_that_is_two_steps_late_is_refused():
    graph = single(layers(1), steps=2)
    by_step = [graph.index[kind, 0, 0, step] for step in range(2) for kind in (Kind.F, Kind.X)]
    late = [graph.index[kind, 0, 0, step] for step in range(2) for kind in (Kind.W, Kind.U)]
    order = (*by_step, graph.index[Kind.F, 0, 0, 2], *late)
    unbound = Schedule(
        type(graph)(**{**vars_of(graph), "needs": tuple(() for _ in graph.tasks)}),
        (Lane("main", graph.tasks[0].resource, order),),
    )
    with pytest.raises(ScheduleError, match="two steps late"):
        step_call(unbound)


def vars_of(graph):
    return {name: getattr(graph, name) for name in graph.__dataclass_fields__}
