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
        ({"microbatches": 2}, "microbatches=2: is rank 1's, but rank 0 has 4"),
        ({"name": "tied"}, 'model="rank 1\'s layers": differ from those of rank 0'),
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


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies(fresh, victim):
    """The first one hosts the store in which ranks look for each other's reasons."""
    world = fresh(3, tcp=True)
    others = [rank for rank in range(3) if rank != victim]
    for rank, (message, seconds) in world.run("death", victim=victim, ranks=others).items():
        assert "the pipeline has stopped" in message, (rank, message)
        assert seconds < SOON
