"""Odd loops on two ranks: what DistributedDataParallel gives bit for bit; where ranks part, an error on both."""

import pytest

from parallel.daso.worlds import World
from parallel.data_parallel.odd import APART

IN_ONE_GO = 20


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("ranks"), 2, 1, scenarios="parallel.data_parallel.odd")
    yield world
    world.close()


def check(ranks, seeds):
    for wrong in ranks.run("loops", seeds=seeds).values():
        assert wrong == []


@pytest.mark.parametrize("first", range(0, 40, IN_ONE_GO))
def test_odd_loops_give_what_ddp_gives(ranks, first):
    check(ranks, list(range(first, first + IN_ONE_GO)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(40, 3000, IN_ONE_GO))
def test_thousands_of_odd_loops_give_what_ddp_gives(ranks, first):
    check(ranks, list(range(first, first + IN_ONE_GO)))


POLICIES = [{"policy": "in_order"}, {"policy": "no_barrier"}, {"policy": "auto"}, {"policy": "reverse_first_k", "k": 2}]


@pytest.mark.parametrize("what", APART)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda o: o["policy"])
@pytest.mark.parametrize(("at", "norms"), [(0, True), (1, False), (2, True)])
def test_ranks_that_part_hear_the_same_error_soon(ranks, what, policy, at, norms):
    answers = ranks.run("apart", what=what, at=at, policy=policy, norms=norms)
    assert answers[0] == answers[1]
    step, said = answers[0]
    assert at < step <= (2 if at == 0 else 4)
    if "step" in what:
        assert step <= at + 2
        assert "the number of steps taken is" in said
    else:
        assert "weights differ between ranks" in said
    if what == "has another rate":
        assert "lr of group 0 is 0.01 on rank 0 and 0.02 on rank 1" in said


def test_ranks_that_begin_to_train_other_layers_hear_so_at_once(ranks):
    assert list(ranks.run("trains_others", layers=[0, 0], timeout=60).values()) == [None, None]
    first, second = ranks.run("trains_others", layers=[0, 3], timeout=60).values()
    assert (first[0], first[1]) == (second[0], second[1]) == (2, "ReplicaError")
    assert "which parameters are trained has changed on rank 0, and not so on rank 1" in first[2]


def test_one_that_begins_to_train_more_by_itself_is_told_when_the_others_do_not_come(ranks):
    first, second = ranks.run("trains_others", layers=[0, None], timeout=2).values()
    assert first[:2] == (2, "ReplicaError")
    assert "has changed on rank 0, and not so on rank 1" in first[2]
    assert second[1] == "LostPeerError"
