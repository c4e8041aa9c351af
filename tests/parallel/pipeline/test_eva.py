"""The Eva family on pipelines: bit for bit what it does without one, or refused; and trial runs that nobody sees."""

import pytest

FAMILY = ["Eva", "EvaF", "EvaS"]


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize(("name", "policy"), [("gpt", "modulo"), ("mlp", "gpipe"), ("convolutions", "fast_forward")])
def test_weights_are_those_of_the_whole_model_bit_for_bit(two, kind, name, policy):
    assert set(two.run("trained", kind=kind, name=name, policy=policy).values()) == {0.0}


@pytest.mark.parametrize("kind", FAMILY)
def test_all_ranks_leave_out_a_step_that_is_not_finite_on_one(two, kind):
    assert set(two.run("trained", kind=kind, name="linears", policy="fast_forward", spoiled=1).values()) == {0.0}


@pytest.mark.parametrize("kind", ["Eva", "EvaF"])
def test_tied_weights_keep_one_rule_on_all_ranks(two, kind):
    """Their gradients differ by rounding, of which AdamW makes whole steps of biases without a gradient, in EvaS."""
    assert all(found < 1e-6 for found in two.run("trained", kind=kind, name="tied", policy="modulo", steps=2).values())


def test_rules_with_one_scale_for_all_layers_are_refused(two):
    for said, hooks in two.run("refused_rules").values():
        assert len(said) == 3
        assert all("layers, which are on 2 ranks" in message for message in said)
        assert hooks == 0


def test_an_optimizer_that_was_made_for_the_whole_model_is_refused(two):
    for said in two.run("made_before").values():
        assert len(said) == 3
        for kind, message in zip(["Eva", "EvaF", "EvaS"], said, strict=True):
            assert f"has an optimizer {kind}:" in message
            assert "make it after the pipeline, for its .module" in message


def test_a_rank_without_an_optimizer_of_the_family_is_named(two):
    found = two.run("missing")
    assert "rank 1 of the pipeline has no optimizer of this kind" in found[0][0]
    assert found[0][1]


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("split", ["fast", "torch"])
def test_a_trial_run_is_seen_by_nobody(two, copied, split):
    """Two steps of two micro-batches: four calls of each layer."""
    for rank, found in two.run("trial", copied=copied, split=split).items():
        assert found["hook"] == found["before"] == found["backward"] == 8, found
        assert found["loss"] == (4 if rank == 1 else 0)
        assert found["tracked"] == [4] * len(found["tracked"])
        assert found["random"]
        assert found["last"]
        if copied:
            assert found["calls"] == [4] * 4


def test_a_hook_that_changes_what_is_handed_on_is_refused(two):
    found = two.run("a_hook_that_changes_shapes")
    assert all("have hooks leave it as it is" in said for said in found.values()), found


@pytest.mark.parametrize(
    "step", ["find_ties", "check_layers", "TiedGradients", "OptimizerClaims", "Stage", "make_runtime"]
)
def test_a_pipeline_that_cannot_be_made_leaves_nothing(fresh, step):
    for rank, (said, marked, groups, threads) in fresh(2).run("failing_constructor", step=step).items():
        assert said == "cannot be made", rank
        assert (marked, groups, threads) == (0, 0, 0), rank
