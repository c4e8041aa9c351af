"""Every operation in the slot of its task, or where it is needed; what a schedule would break is refused."""

import pytest
import torch

from compiler.passes.traced import call_of, placed, trace
from gradweave.compiler.passes.slots import note_places, noted_places, slot_operations
from gradweave.errors import UnsupportedError
from gradweave.step_graph.tasks import Place

IN_ORDER = "F0 F1 W1 X1 W0 X0 U0 U1"
EARLY = "F0 F1 W1 X1 U1 W0 X0 U0"


def named(slotted):
    """Operations by task, with a mark where a task runs for the step before."""
    slots = slotted.call.slots
    return {
        f"{'~' * slot.carried}{slot.task.kind}{slot.task.layer}": [node.name for node in nodes]
        for slot, nodes in zip(slots, slotted.operations, strict=True)
        if nodes
    }


def two_layers(upper, lower, x):
    """Two layers by hand: activations, gradients and updates."""
    y = x * lower  # F0
    loss = y + upper  # F1
    above = loss * 2  # X1, the backward of an activation that W1 needs too
    of_upper = above + 1  # W1
    below = above * upper  # X1
    of_lower = below + y  # W0
    lower.sub_(of_lower)  # U0
    upper.sub_(of_upper)  # U1
    return [loss]


TASKS = "F0 F1 X1 W1 X1 W0 U0 U1"


def test_a_part_of_x_that_w_needs_first_runs_with_w():
    graph, (upper, lower, _) = trace(two_layers, 3)
    slotted = slot_operations(graph.graph, placed(graph, TASKS), call_of(2, IN_ORDER), lasting=[upper, lower])
    assert named(slotted) == {
        "F0": ["mul"], "F1": ["add"], "W1": ["mul_1", "add_1"], "X1": ["mul_2"], "W0": ["add_2"],
        "U0": ["sub_"], "U1": ["sub__1"],
    }  # fmt: skip


def test_every_operation_has_one_slot_and_a_slot_follows_what_it_needs():
    graph, (upper, lower, _) = trace(two_layers, 3)
    call = call_of(2, "F0 F1 X1 W1b X0 W0b U0 U1")
    slotted = slot_operations(graph.graph, placed(graph, TASKS), call, lasting=[upper, lower])
    inside = [node for nodes in slotted.operations for node in nodes]
    assert len(inside) == len(set(inside)) == 8
    turn = {node: number for number, nodes in enumerate(slotted.operations) for node in nodes}
    for node in inside:
        for used in node.all_input_nodes:
            if used in turn and turn[used] != turn[node]:
                assert turn[used] < turn[node]
                assert turn[used] in slotted.after[turn[node]]


def test_an_update_of_the_next_step_reads_the_batch_as_it_was():
    def step(weight, x):
        loss = weight * x
        weight.sub_(x * 3)
        return [loss]

    graph, (weight, x) = trace(step, 2)
    places = placed(graph, "F0 W0 U0")
    assert slot_operations(graph.graph, places, call_of(1, "F0 W0 X0 U0"), lasting=[weight]).kept == frozenset()
    late = call_of(2, "~W1 ~U1 F0 F1 W0 X0 U0 X1")
    places = placed(graph, "F0 W1 U1")
    slotted = slot_operations(graph.graph, places, late, lasting=[weight])
    assert slotted.kept == {x}
    assert named(slotted) == {"F0": ["mul"], "~W1": ["mul_1"], "~U1": ["sub_"]}


def test_an_update_behind_all_gradients_is_not_planned_before_them():
    def clipped(upper, lower, x):
        of_upper, of_lower = x * 2, x * 3
        norm = of_upper + of_lower
        upper.sub_(of_upper * norm)
        lower.sub_(of_lower * norm)
        return [x + 0]

    graph, (upper, lower, _) = trace(clipped, 3)
    places = placed(graph, "W1 W0 U0 U1 U1 U0 U0 F0")
    slotted = slot_operations(graph.graph, places, call_of(2, IN_ORDER), lasting=[upper, lower])
    assert named(slotted)["U0"] == ["add", "mul_3", "sub__1"]
    with pytest.raises(UnsupportedError, match="U1 needs a part of W0, which comes later"):
        slot_operations(graph.graph, places, call_of(2, EARLY), lasting=[upper, lower])


def test_an_update_stays_behind_what_still_reads_its_weight():
    def step(upper, lower, x):
        of_upper = x * 3
        below = lower * x + upper  # X0 reads the upper weight once more
        upper.sub_(of_upper)
        lower.sub_(below)
        return [x + 0]

    graph, (upper, lower, _) = trace(step, 3)
    places = placed(graph, "W1 X0 X0 U1 U0 F0")
    slot_operations(graph.graph, places, call_of(2, IN_ORDER), lasting=[upper, lower])
    with pytest.raises(UnsupportedError, match="U1 uses memory before X0"):
        slot_operations(graph.graph, places, call_of(2, EARLY), lasting=[upper, lower])


def test_an_update_left_to_the_next_step_comes_before_the_forward_that_reads_its_weight():
    def step(upper, lower, x):
        y = x * upper  # F0 reads what U1 writes, as a layer that is used twice
        loss = y * lower
        upper.sub_(loss)
        lower.sub_(y)
        return [loss]

    graph, (upper, lower, _) = trace(step, 3)
    late = call_of(2, "F0 ~U1 F1 W1 X1 W0 X0 U0")
    with pytest.raises(UnsupportedError, match="F0 uses memory before U1"):
        slot_operations(graph.graph, placed(graph, "F0 F1 U1 U0"), late, lasting=[upper, lower])
    fine = slot_operations(graph.graph, placed(graph, "F1 F1 U1 U0"), late, lasting=[upper, lower])
    assert named(fine)["~U1"] == ["sub_"]


def test_memory_of_one_step_is_no_memory_of_the_next():
    """Only what lasts is the same memory in every call: a buffer made in a step may be read late."""

    def step(weight, x):
        scratch = x * 2
        scratch.add_(1)
        weight.sub_(scratch)
        return [x + 0]

    graph, (weight, _) = trace(step, 2)
    late = call_of(2, "F0 F1 ~U1 W1 X1 W0 X0 U0")
    slotted = slot_operations(graph.graph, placed(graph, "W1 W1 U1 F0"), late, lasting=[weight])
    assert named(slotted)["~U1"] == ["sub_"]


def test_random_numbers_are_drawn_in_the_traced_order():
    def step(weight, x):
        first = torch.rand_like(x)
        second = torch.rand_like(x)
        weight.sub_(first)
        return [second + 0]

    graph, (weight, _) = trace(step, 2)
    places = placed(graph, "U0 F0 U0 F0")
    with pytest.raises(UnsupportedError, match="uses memory before"):
        slot_operations(graph.graph, places, call_of(1, "F0 W0 X0 U0"), lasting=[weight])
    slot_operations(graph.graph, placed(graph, "F0 F0 U0 F0"), call_of(1, "F0 W0 X0 U0"), lasting=[weight])


def test_a_number_that_nobody_takes_draws_nothing_to_its_place():
    def step(weight, x):
        total = weight.mul_(x)
        total.sum()  # as an optimizer that reads a number it does not need
        return [x + 0]

    graph, (weight, _) = trace(step, 2)
    slotted = slot_operations(graph.graph, placed(graph, "U1 U0 F0"), call_of(2, IN_ORDER), lasting=[weight])
    assert named(slotted) == {"F0": ["add"], "U1": ["mul_", "sum_1"]}


def test_what_is_seen_between_steps_is_changed_in_its_own_step():
    """As a loss scale, with the flag that it is changed by; weights that nobody sees may wait."""

    def step(weight, scale, x):
        loss = x * weight
        flag = x * 2
        flag.add_(scale)
        scale.mul_(flag)
        weight.sub_(flag)
        return [loss]

    graph, (weight, scale, _) = trace(step, 3)
    late = call_of(2, "~U1 F0 F1 W1 X1 W0 X0 U0")
    slotted = slot_operations(
        graph.graph, placed(graph, "F0 W1 U1 U1 U1"), late, lasting=[weight, scale], pending=[weight]
    )
    assert named(slotted) == {"F0": ["mul"], "W1": ["mul_1"], "U0": ["add_", "mul_"], "~U1": ["sub_"]}


def test_what_a_loop_may_change_is_kept():
    """A mask, and a result that the step returns."""

    def step(weight, mask, x):
        hidden = x * 2
        weight.sub_(hidden * mask)
        return [hidden]

    graph, (weight, mask, _) = trace(step, 3)
    late = call_of(2, "F0 F1 ~W1 ~U1 X1 W0 X0 U0")
    slotted = slot_operations(graph.graph, placed(graph, "F0 W1 U1"), late, lasting=[weight, mask], pending=[weight])
    assert {node.name for node in slotted.kept} == {"mask_1", "mul"}


def test_random_numbers_are_not_drawn_in_the_next_step():
    def step(weight, x):
        weight.sub_(torch.rand_like(x))
        return [x + 0]

    graph, (weight, _) = trace(step, 2)
    late = call_of(2, "F0 F1 ~U1 W1 X1 W0 X0 U0")
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        slot_operations(graph.graph, placed(graph, "U1 U1 F0"), late, lasting=[weight])


def test_places_are_noted_and_those_of_new_operations_are_their_users():
    graph, _ = trace(lambda x: [(x * 2) + 1], 1)
    product, total = [node for node in graph.graph.nodes if node.op == "call_function"]
    note_places({total: Place("U", 3)})
    assert noted_places(graph.graph) == {product: Place("U", 3), total: Place("U", 3)}


def test_a_use_that_comes_again_after_a_write_is_seen():
    def step(weight, x):
        first = x * weight
        weight.sub_(x)
        again = x * weight
        return [first, again]

    graph, (weight, _) = trace(step, 2)
    with pytest.raises(UnsupportedError, match="F0 needs a part of U0"):
        slot_operations(graph.graph, placed(graph, "F0 U0 F0"), call_of(1, "F0 W0 X0 U0"), lasting=[weight])


def test_parts_of_one_memory_are_apart():
    """As the gradients of two layers in one message."""

    def step(upper, lower, x):
        message = x + 0
        first, second = message[:2], message[2:]
        first.mul_(2)
        second.mul_(3)
        upper.sub_(second.sum())
        lower.sub_(first.sum())
        return [x * 1]

    graph, (upper, lower, _) = trace(step, 3)
    tasks = "W1 - - U0 U1 U1 U1 U0 U0 F0"
    slotted = slot_operations(graph.graph, placed(graph, tasks), call_of(2, EARLY), lasting=[upper, lower])
    assert named(slotted)["U1"][-1] == "sub_"
