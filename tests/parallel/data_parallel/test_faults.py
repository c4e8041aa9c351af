import pytest

from parallel.daso.worlds import World


@pytest.fixture
def doomed(tmp_path):
    world = World(tmp_path, 2, 1, scenarios="parallel.data_parallel.scenarios")
    yield world
    world.close()


@pytest.mark.parametrize("policy", ["in_order", "no_barrier", "reverse_first_k"])
def test_a_rank_that_dies_is_an_error_on_the_others(doomed, policy):
    doomed.ask("dies", range(2), policy=policy, limit=8)
    heard = doomed.answers([0])[0]
    assert heard["kind"] == "LostPeerError"
    assert "a rank is lost" in heard["said"]
    assert heard["seconds"] < 30
    assert heard["again"] == ("" if policy == "in_order" else "LostPeerError")
    assert heard["whole"]


def test_a_rank_that_runs_out_of_batches_is_an_error_on_the_others(doomed):
    answers = doomed.run("runs_out", limit=3)
    assert "give every rank the same number of batches" in answers[0]
    assert answers[1] == ""
