"""What goes wrong on one rank is an error on all of them, soon, and never a hang."""

import pytest

SOON = 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "nonsense"}, "policy='nonsense': use one of auto, fast_forward"),
        ({"policy": "modulo", "group": 3}, "group=3: 8 layers in groups of 3 do not share out evenly over 2 ranks"),
        ({"policy": "modulo", "group": 8}, "group=8: 8 layers in groups of 8 do not share out evenly"),
        ({"policy": "gpipe", "max_in_flight": 2}, "max_in_flight=2: gpipe is torch's, which takes no cap"),
        ({"policy": "modulo", "microbatches": 0}, "microbatches=0: give a whole number"),
        ({"policy": "auto"}, "policy='auto': needs costs=measure_layers"),
        ({"policy": "modulo", "byte_budget": 9}, "byte_budget=9: needs costs=measure_layers"),
        ({"policy": "modulo", "split": "slow"}, "split='slow': use one of fast, torch"),
        ({"policy": "one_f_one_b", "microbatches": 1}, "microbatches=1: one_f_one_b needs one per rank"),
    ],
)
def test_what_is_refused_is_refused_by_all(two, arguments, message):
    for rank, found in two.run("refused", **arguments).items():
        assert message in found, (rank, found)


@pytest.mark.parametrize(
    ("different", "message"),
    [
        ({"microbatches": 2}, "microbatches: is 2 on rank 1 and 4 on rank 0"),
        ({"name": "tied"}, "parameter 7.out.weight: is the same as 0.tokens.weight on rank 1 and of shape"),
        ({"group": 0}, "group=0: give a whole number, at least 1"),
    ],
)
def test_ranks_that_differ_are_refused_by_all(two, different, message):
    for rank, found in two.run("refused", policy="modulo", different=different).items():
        assert message in found, (rank, found)


@pytest.mark.parametrize(("sizes", "culprit"), [((12, 8), "inputs"), ((8, 4), "target"), ((6, 8), "inputs")])
def test_a_batch_of_another_shape_stops_all_ranks(two, sizes, culprit):
    found = two.run("wrong_batch", sizes=sizes)
    for first, second in found.values():
        assert culprit in first
        assert "this pipeline has stopped" in second


@pytest.mark.parametrize(("kind", "message"), [("growing", "must not change"), ("failing", "had enough")])
def test_a_layer_that_goes_wrong_stops_all_ranks_and_all_know_why(three, kind, message):
    for rank, (found, seconds) in three.run("odd_layer", kind=kind).items():
        assert message in found, (rank, found)
        assert seconds < SOON


@pytest.mark.parametrize("policy", ["fast_forward", "gpipe"])
def test_thawing_all_layers_of_the_first_stage_later_is_refused_by_all(two, policy):
    for rank, (found, _) in two.run("frozen_or_thawed_later", policy=policy, trained_first=False).items():
        assert "needs a gradient, and did not in the first step" in found, (rank, found)


@pytest.mark.parametrize("policy", ["fast_forward", "gpipe"])
def test_freezing_all_layers_of_the_first_stage_later_is_right(two, policy):
    for found in two.run("frozen_or_thawed_later", policy=policy, trained_first=True).values():
        assert found == (None, [])


@pytest.mark.parametrize("options", [{"policy": "fast_forward"}, {"policy": "gpipe"}, {"policy": "zbv"}])
@pytest.mark.parametrize("split", ["fast", "torch"])
def test_a_tensor_that_the_next_stage_does_not_use_is_refused_by_all(two, options, split):
    """torch would send zeros for it, with which weights decay that have no gradient without a pipeline."""
    for rank, found in two.run("a_step", name="unused", split=split, **options).items():
        assert "does not use tensor 1 of what it is given" in found, (rank, found)


@pytest.mark.parametrize(("reshaped", "words"), [(False, "lacks 3.weight"), (True, "is of shape (6, 7), not (6, 6)")])
def test_a_state_that_one_rank_cannot_load_is_loaded_by_none(two, reshaped, words):
    for rank, (message, same, after) in two.run("torn_state", reshaped=reshaped).items():
        assert words in message, (rank, message)
        assert same
        assert after is None


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies(fresh, victim):
    """The first one hosts the store in which ranks look for each other's reasons."""
    world = fresh(3, tcp=True)
    others = [rank for rank in range(3) if rank != victim]
    for rank, (message, seconds) in world.run("death", victim=victim, ranks=others).items():
        assert "the pipeline has stopped" in message, (rank, message)
        assert seconds < SOON


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("smaller", "leave the last, smaller batch out"),
        ("no grad", "outside of that"),
        ("first without a target", "target=None: give a tensor"),
        ("first with a dict", "inputs='dict': give a tensor"),
        ("first with a tuple", "target='tuple': give a tensor"),
        ("first not a multiple", "must be a multiple of the 4 micro-batches"),
    ],
)
def test_a_step_that_all_ranks_refuse_ends_nothing(two, how, message):
    for rank, (said, worst) in two.run("refused_steps", how=how).items():
        assert message in said, (rank, said)
        assert worst == 0


@pytest.mark.parametrize("how", ["smaller", "first without a target"])
def test_ranks_that_need_nothing_of_a_batch_hear_of_it(three, how):
    for said, worst in three.run("refused_steps", how=how).values():
        assert "smaller batch" in said or "target=None" in said
        assert worst == 0


@pytest.mark.parametrize(("split", "policy"), [("torch", "fast_forward"), ("torch", "modulo"), ("fast", "modulo")])
def test_stages_may_hand_on_views(three, split, policy):
    assert set(three.run("views", split=split, policy=policy).values()) == {0.0}


def test_reentrant_checkpoints_are_refused(two):
    for said, left in two.run("reentrant").values():
        assert "use_reentrant=False" in said, said
        assert all(left)
