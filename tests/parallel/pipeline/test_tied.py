"""Weights that layers of several ranks share."""

import pytest

from gradweave.parallel.pipeline import Pipeline
from parallel.pipeline.models import batch, loss_fn, make
from parallel.pipeline.training import gradients, raised


@pytest.mark.parametrize("policy", ["fast_forward", "modulo", "zbv"])
def test_three_ranks_of_which_each_two_share_a_weight(three, policy):
    for rank, found in three.run(gradients, name="tied_in_a_ring", policy=policy).items():
        assert found["worst"] < 1e-6, (rank, found)


def test_a_tied_weight_that_no_layer_uses_has_no_gradient(two):
    """``gradients`` compares which ones are None: weight decay leaves those alone."""
    for rank, found in two.run(gradients, name="tied_unused", policy="fast_forward").items():
        assert found["worst"] < 1e-6, (rank, found)


def tied_weight_frozen_on_one_rank():
    """Freeze a weight that two ranks share on the second one alone; return what a step raises."""
    pipe = Pipeline(make("tied"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    if pipe.has_last_stage:
        pipe.module[-1].out.weight.requires_grad_(False)
    return raised(lambda: pipe.step(*batch("tied")))


def test_a_tied_weight_that_is_frozen_on_one_rank_only_is_refused_by_all(two):
    for rank, message in two.run(tied_weight_frozen_on_one_rank).items():
        assert "0.tokens.weight is one weight of ranks [0, 1], but frozen on [1] only" in message, (rank, message)
