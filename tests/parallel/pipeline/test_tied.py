"""Weights that layers of several ranks share."""

import pytest


@pytest.mark.parametrize("policy", ["fast_forward", "modulo", "zbv"])
def test_three_ranks_of_which_each_two_share_a_weight(three, policy):
    for rank, found in three.run("gradients", name="tied_in_a_ring", policy=policy).items():
        assert found["worst"] < 1e-6, (rank, found)


def test_a_tied_weight_that_nobody_uses_has_no_gradient(two):
    """The scenario compares which gradients are None: weight decay leaves those alone."""
    for rank, found in two.run("gradients", name="tied_unused", policy="fast_forward").items():
        assert found["worst"] < 1e-6, (rank, found)


def test_a_tied_weight_that_is_frozen_on_one_rank_only_is_refused_by_all(two):
    for rank, message in two.run("tied_weight_frozen_on_one_rank").items():
        assert "0.tokens.weight is one weight of ranks [0, 1], but frozen on [1] only" in message, (rank, message)
