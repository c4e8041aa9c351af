"""What ranks learn of each other, and what they leave behind."""

import pytest

SOON = 8


@pytest.mark.parametrize("timeout", [-1, 0, "soon", float("nan"), float("inf")])
def test_a_timeout_that_is_wrong_on_one_rank_is_refused_by_all(two, timeout):
    for rank, found in two.run("refused", policy="modulo", different={"timeout": timeout}).items():
        assert f"timeout={timeout!r}: give a positive number of seconds" in found, (rank, found)


def test_words_of_a_user_are_not_taken_for_a_lost_rank(two):
    found = two.run("a_loss_that_speaks_of_connections")
    assert found[1].startswith("RuntimeError: metrics server: connection refused")
    assert "rank 1 failed with RuntimeError: metrics server" in found[0]


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_others_know_of_a_failure_at_once_even_while_its_error_is_kept(three, kind):
    for rank, seconds in three.run("a_failure_that_is_kept", kind=kind).items():
        assert seconds < SOON, rank


@pytest.mark.parametrize("tcp", [False, True])
def test_closed_pipelines_do_not_pile_up_open_files(fresh, tcp):
    for more in fresh(2, tcp=tcp).run("descriptors", count=4).values():
        assert more < 4


def test_closing_waits_for_nobody_for_long(two):
    found = two.run("closed_by_one")
    assert found[0][0] < SOON
    assert [message for _, message in found.values()] == [None, None]


def test_closing_does_not_free_a_name_that_torch_would_give_twice(fresh):
    assert set(fresh(3).run("closed_between_groups").values()) == {None}
