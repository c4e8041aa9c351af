"""Pipelines in real processes, against training without one."""

import pytest
import torch

from gradweave.schedule import Costs, LayerCost

EXACT = [
    ("fast_forward", {}),
    ("modulo", {"group": 1}),
    ("modulo", {"group": 2}),
    ("gpipe", {}),
    ("one_f_one_b", {}),
    ("interleaved", {"group": 2}),
    ("interleaved_zero_bubble", {"group": 2}),
    ("zbv", {}),
]


@pytest.mark.parametrize(("policy", "options"), EXACT)
@pytest.mark.parametrize("split", ["fast", "torch"])
def test_every_schedule_gives_the_gradients_of_the_whole_model_bit_for_bit(two, policy, options, split):
    for rank, found in two.run("gradients", name="gpt", policy=policy, split=split, **options).items():
        assert found["worst"] == 0, (rank, found)
        assert found["policy"] == policy


@pytest.mark.parametrize("policy", ["fast_forward", "modulo", "gpipe"])
@pytest.mark.parametrize("name", ["mlp", "convolutions", "pairs", "recomputed"])
def test_norms_frozen_layers_convolutions_tuples_and_recomputed_activations(two, policy, name):
    """The trial run by which torch finds out shapes leaves no trace in the statistics of norms."""
    for rank, found in two.run("gradients", name=name, policy=policy).items():
        assert found["worst"] == 0, (rank, found)


@pytest.mark.parametrize("policy", ["modulo", "fast_forward", "interleaved_zero_bubble"])
def test_tied_embeddings(two, policy):
    """Their gradient is a sum over ranks, in another order than that of the whole model."""
    for found in two.run("gradients", name="tied", policy=policy).values():
        assert found["worst"] < 1e-6


def test_gradients_of_several_steps_add_up(two):
    two.run("accumulation")


def test_names_are_those_of_the_whole_model(two):
    found = two.run("gradients", name="gpt", policy="fast_forward")
    assert "0.tokens.weight" in found[0]["names"]
    assert "7.out.weight" in found[1]["names"]
    assert set(found[0]["names"]).isdisjoint(found[1]["names"])


def test_weights_after_training_with_clipping(two):
    for found in two.run("training", name="gpt", policy="modulo", clip=0.1).values():
        assert found["worst"] == 0


def test_clipping_counts_tied_weights_once(two):
    for found in two.run("training", name="tied", policy="modulo", clip=0.1, steps=1).values():
        assert found["worst"] < 1e-5


def test_updates_fused_into_the_next_forward(two):
    plain = two.run("training", name="gpt", policy="fast_forward")
    fused = two.run("training", name="gpt", policy="fast_forward", fused=True, clip=0.1)
    for rank in plain:
        assert plain[rank]["worst"] == fused[rank]["worst"] == 0
        assert plain[rank]["held"] == fused[rank]["held"] > 0


def test_updates_fused_into_backward_are_refused(two):
    for message in two.run("fused_in_backward").values():
        assert 'mode="forward"' in message


def test_checkpoints_are_those_of_the_whole_model(two, tmp_path):
    for message in two.run("checkpoints", folder=str(tmp_path)).values():
        assert "state='0 entries': lacks " in message


def test_optimizer_state_moves_to_a_pipeline_that_is_cut_otherwise(two, tmp_path):
    first, second = two.run("optimizer_state", folder=str(tmp_path))[0]
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("policy", ["fast_forward", "gpipe"])
def test_autocast_is_for_forwards_only(two, policy):
    assert set(two.run("autocast", policy=policy).values()) == {0.0}


def test_hooks_on_gradients(two):
    assert all(two.run("hooks").values())


@pytest.mark.parametrize("cap", [1, 2])
def test_a_cap_on_micro_batches_in_flight(two, cap):
    for found in two.run("gradients", name="gpt", policy="modulo", group=1, max_in_flight=cap).values():
        assert found["worst"] == 0
        assert max(found["in_flight"]) <= cap


def uneven(**bytes_of):
    heavy = {0: 5.0}
    return Costs(tuple(LayerCost(f"{i}", *([heavy.get(i, 1.0)] * 3), **bytes_of) for i in range(8)))


def test_uneven_layers_are_balanced_by_their_costs(two):
    for found in two.run("planned", costs=uneven(), policy="fast_forward").values():
        assert found["layers"] == [2, 6]


def test_auto_takes_what_is_predicted_to_be_fastest(two):
    found = two.run("planned", costs=uneven(), policy="auto")
    assert found[0]["layers"] == found[1]["layers"]
    assert found[0]["policy"] == found[1]["policy"]
    assert found[0]["loss"] is None or found[1]["loss"] is None


def test_a_byte_budget_bounds_what_is_predicted_and_what_waits(two):
    costs = uneven(input_bytes=1000, output_bytes=1000)
    free = two.run("planned", costs=costs, policy="modulo", group=1)
    tight = two.run("planned", costs=costs, policy="modulo", group=1, byte_budget=10000)
    for rank in free:
        assert tight[rank]["peak"] <= 10000 < free[rank]["peak"]
        assert tight[rank]["held"] <= free[rank]["held"]


def test_weight_gradients_that_wait_are_computed_early_when_they_hold_too_much(two):
    for found in two.run("gradients", name="gpt", policy="modulo", group=1, costs=uneven(), byte_budget=1).values():
        assert found["worst"] == 0
        assert found["held"] == 0


def test_a_pipeline_on_a_group_of_some_ranks(fresh):
    assert set(fresh(4).run("in_groups").values()) == {0.0}


def test_costs_and_link_are_measured_by_the_first_rank_and_all_follow(two):
    found = two.run("measured")
    assert found[0] == found[1]
    assert found[0][2] > 0
