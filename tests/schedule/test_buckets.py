from hypothesis import given
from hypothesis import strategies as st

from gradweave.schedule.buckets import fill, message_buckets, readiness

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(sizes, st.integers(0, 40))
def test_a_bucket_is_full_when_it_holds_the_limit_and_not_before(sizes, limit):
    buckets = fill(range(len(sizes)), sizes.__getitem__, limit)
    assert [layer for bucket in buckets for layer in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert len(bucket) == 1 or sum(sizes[layer] for layer in bucket[:-1]) < limit
    for bucket in buckets[:-1]:
        assert sum(sizes[layer] for layer in bucket) >= limit


def test_what_is_held_back_comes_last_and_first_layer_first():
    assert readiness("abcde") == (["e", "d", "c", "b", "a"], [])
    assert readiness("abcde", 2) == (["e", "d", "c"], ["a", "b"])
    assert readiness("abcde", 5) == ([], ["a", "b", "c", "d", "e"])


def test_what_is_held_back_shares_no_message_with_what_is_not():
    one = lambda _: 1  # noqa: E731
    assert message_buckets(range(5), 2, one, 99) == [[4, 3, 2], [0, 1]]
    assert message_buckets(range(5), 1, one, 99) == [[4, 3, 2, 1], [0]]
    assert message_buckets(range(5), 0, one, 2) == [[4, 3], [2, 1], [0]]
