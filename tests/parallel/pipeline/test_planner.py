"""Plans found by simulation."""

import pytest

from gradweave.errors import ArgumentError, ScheduleError, UnsupportedError
from gradweave.parallel.pipeline.partition import by_layer
from gradweave.parallel.pipeline.planner import Settings, choose
from gradweave.schedule import Costs, LayerCost, Link

UNIFORM = Costs.uniform(24)


def test_small_groups_where_the_link_is_free_and_large_ones_where_it_is_slow():
    assert choose(Settings("modulo", 4), UNIFORM, 4).group == 1
    slow = choose(Settings("modulo", 4), UNIFORM, 4, Link(0.25))
    assert slow.group > 1
    for group in (1, 2, 3, 6):
        assert slow.seconds <= choose(Settings("modulo", 4, group), UNIFORM, 4, Link(0.25)).seconds * 1.005


def test_a_little_latency_does_not_spoil_an_order():
    free, late = (choose(Settings("fast_forward", 4), UNIFORM, 4, link) for link in (Link(), Link(latency=0.01)))
    assert late.seconds < free.seconds * 1.01


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 4), (4, 8), (8, 8)])
def test_modulo_is_no_slower_than_interleaved_zero_bubble_at_equal_memory(ranks, microbatches):
    rival = choose(Settings("interleaved_zero_bubble", microbatches, 1), UNIFORM, ranks)
    ours = choose(Settings("modulo", microbatches, 1, byte_budget=rival.peak_bytes), UNIFORM, ranks)
    assert ours.peak_bytes <= rival.peak_bytes
    assert ours.seconds <= rival.seconds


@pytest.mark.parametrize("costs", [Costs.uniform(12), Costs((LayerCost("l", 1.0, 1.4, 0.8, 0.1, 1, 1, 1),) * 12)])
@pytest.mark.parametrize("link", [Link(), Link(0.5)])
def test_auto_is_no_slower_than_any_policy(costs, link):
    best = choose(Settings("auto", 4), costs, 4, link)
    for policy in ("gpipe", "one_f_one_b", "interleaved", "interleaved_zero_bubble", "zbv", "fast_forward", "modulo"):
        assert best.seconds <= choose(Settings(policy, 4), costs, 4, link).seconds * 1.005


def test_a_budget_is_kept_or_refused():
    free = choose(Settings("modulo", 8, 1), UNIFORM, 4)
    tight = choose(Settings("modulo", 8, 1, byte_budget=25), UNIFORM, 4)
    assert tight.peak_bytes <= 25 < free.peak_bytes
    assert tight.seconds > free.seconds
    with pytest.raises(ScheduleError, match=r"byte_budget=3: modulo holds .* bytes at least"):
        choose(Settings("modulo", 8, 1, byte_budget=3), UNIFORM, 4)


def test_a_plan_carries_the_name_of_the_policy_that_made_it_and_says_why():
    free = choose(Settings("modulo", 8, 1), UNIFORM, 4)
    tight = choose(Settings("modulo", 8, 1, byte_budget=36), UNIFORM, 4)
    assert tight.program.policy == "memory_bounded"
    said = tight.explain()
    assert said.startswith("memory_bounded: 24 stages of up to 1 layers on 4 ranks, 8 micro-batches; predicted ")
    assert "policy='modulo': the least bytes among the fastest of" in said
    assert "keep to byte_budget=36" in said
    assert "without costs=" not in free.explain()
    unknown, _ = by_layer(None, ["a", "b"])
    assert "without costs=" in choose(Settings("modulo", 2), unknown, 2).explain()


def test_the_bounded_policy_can_be_asked_for():
    asked = choose(Settings("memory_bounded", 8, 1, byte_budget=25), UNIFORM, 4)
    assert asked.program.policy == "memory_bounded"
    assert asked.peak_bytes <= 25
    with pytest.raises(ScheduleError, match=r"byte_budget=1: memory_bounded holds .* bytes at least"):
        choose(Settings("memory_bounded", 8, 1, byte_budget=1), UNIFORM, 4)


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        (Settings("modulo", 4, 5), 4, "group=5: 24 layers in groups of 5 .* give a group of 1, 2, 3, 6"),
        (Settings("fast_forward", 4, 3), 4, "group=3: .* with fast_forward"),
        (Settings("modulo", 4), 25, "a model of 24 layers: there are 25 ranks; give at least one layer"),
        (Settings("zbv", 4), 13, "a model of 24 layers: zbv needs 26"),
        (Settings("modulo", 4, True), 4, "group=True: give a whole number"),
    ],
)
def test_what_is_refused(settings, ranks, message):
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        choose(settings, UNIFORM, ranks)
