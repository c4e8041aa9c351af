"""Cutting a slotted step into regions: few, each on one lane, and none that begins before what it waits for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compiler.passes.traced import TASKS, call_of, placed, step_of_two, trace
from compiler.planned import POLICIES
from gradweave.compiler.passes.regions import cut, with_own_views
from gradweave.compiler.passes.slots import SlottedStep, slot_operations
from gradweave.schedule import plan, single
from gradweave.schedule.calls import step_call
from schedule.strategies import costs


def regions_of(order, tasks=TASKS, step=step_of_two, **options):
    graph, (upper, lower, _) = trace(step, 3)
    slotted = slot_operations(graph.graph, placed(graph, tasks), call_of(2, order), lasting=[upper, lower])
    return cut(graph, slotted, **options)


def shown(step):
    slots = step.slotted.call.slots
    return [
        " ".join(f"{slots[number].task.kind}{slots[number].task.layer}" for number in region.slots)
        for region in step.regions
    ]


def test_one_lane_is_one_region():
    made = regions_of("F0 F1 W1 X1 W0 X0 U0 U1")
    assert shown(made) == ["F0 F1 W1 X1 W0 X0 U0 U1"]
    assert made.regions[0].after == ()


def test_a_region_ends_where_another_lane_waits_and_begins_where_it_waits_itself():
    made = regions_of("F0 F1 X1 W1b U1b W0 X0 U0")
    assert shown(made) == ["F0 F1", "X1", "W1", "U1", "W0 X0 U0"]  # U1 writes what X1 reads
    assert [region.after for region in made.regions] == [(), (), (0,), (1,), ()]


def test_an_update_on_the_main_lane_waits_for_the_gradient_of_the_other():
    made = regions_of("F0 F1 X1 W1b W0 X0 U0 U1")
    assert shown(made) == ["F0 F1", "X1 W0 X0 U0", "W1", "U1"]
    assert [region.after for region in made.regions] == [(), (), (0,), (2,)]


def test_work_of_the_step_before_is_a_region_of_its_own():
    made = regions_of("F0 ~U1 F1 W1 X1 W0 X0 U0")
    assert shown(made) == ["F0", "U1", "F1 W1 X1 W0 X0 U0"]
    assert [region.carried for region in made.regions] == [False, True, False]


def test_every_task_by_itself():
    made = regions_of("F0 F1 X1 W1b U1b W0 X0 U0", by_task=True)
    assert shown(made) == ["F0", "F1", "X1", "W1", "U1", "W0", "X0", "U0"]


@given(costs(max_layers=4), st.sampled_from(POLICIES), st.booleans())
def test_every_slot_in_one_region_of_its_lane_and_behind_what_it_follows(network, policy, by_task):
    """Without operations: by what a schedule says alone."""
    call = step_call(plan(single(network, steps=2), policy=policy))
    after = [set() for _ in call.slots]
    for slot, earlier in call.waits:
        after[slot].add(earlier)
    graph, _ = trace(lambda x: [x + 1], 1)
    slotted = SlottedStep(call, tuple(() for _ in call.slots), tuple(map(frozenset, after)), frozenset())
    regions = cut(graph, slotted, by_task=by_task).regions
    assert sorted(slot for region in regions for slot in region.slots) == list(range(len(call.slots)))
    number_of = {slot: number for number, region in enumerate(regions) for slot in region.slots}
    # What a region has behind it: the regions before it on its lane, those that it waits for, and theirs.
    behind, last = [], {}
    for number, region in enumerate(regions):
        assert {call.slots[slot].lane for slot in region.slots} == {region.lane}
        assert {call.slots[slot].carried for slot in region.slots} == {region.carried}
        before = {number}
        for one in (*region.after, *last.get(region.lane, ())):
            assert one < number
            before |= behind[one]
        behind.append(before)
        last[region.lane] = (number,)
    for slot, earlier in call.waits:
        assert number_of[earlier] in behind[number_of[slot]]


def test_views_of_inputs_are_made_in_every_region_that_uses_them():
    """A compiler takes an input and a view of it for two tensors, and does not see a write to one in the other."""

    def step(upper, lower, x):
        flat = upper.view(2, 2)
        loss = x.view(2, 2) * flat
        upper.sub_(x)
        lower.sub_((loss * flat).view(-1))
        return [loss]

    made = with_own_views(regions_of("F0 F1 X1 W1b U1b W0 X0 U0", "F0 F1 F1 U1 W0 W0 U0", step))
    for region in made.regions:
        assert not {"upper_1", "view"} <= {node.name for node in region.inputs}
        assert not any(node.name == "view" for node in region.outputs)
    assert sum("view.default](args = (%upper_1" in str(region.graph.graph) for region in made.regions) == 2


def test_a_region_that_changes_what_another_has_made_is_not_compiled_by_itself():
    def step(upper, lower, x):
        loss = x * upper
        scratch = loss + lower
        scratch.add_(1)
        upper.sub_(scratch)
        lower.sub_(x)
        return [loss]

    made = regions_of("F0 F1 X1 W1b U1b W0 X0 U0", "F0 X1 X1 U1 U0", step)
    assert with_own_views(made) is None


def test_regions_have_the_outputs_that_others_take():
    made = regions_of("F0 F1 X1 W1b U1b W0 X0 U0")
    first, _, side, update, rest = made.regions
    assert [node.name for node in first.outputs] == ["mul", "mul_1"]
    assert [node.name for node in side.outputs] == ["add"]
    assert update.outputs == rest.outputs == ()
    assert [node.name for node in update.inputs] == ["upper_1", "add"]


def test_modules_of_the_whole_are_there():
    assert isinstance(regions_of("F0 F1 W1 X1 W0 X0 U0 U1").regions[0].graph, nn.Module)


@pytest.mark.parametrize("order", ["F0 F1 X1 W1b U1b W0 X0 U0", "F0 ~U1 F1 W1 X1 W0 X0 U0"])
def test_compiled_regions_take_the_same_inputs(order):
    made = with_own_views(regions_of(order))
    assert [region.after for region in made.regions] == [region.after for region in regions_of(order).regions]
    for region in made.regions:
        placeholders = [node for node in region.graph.graph.nodes if node.op == "placeholder"]
        assert len(placeholders) == len(region.inputs)
