import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave.profile.device_shares import equal_groups, fit_shares, slowdown

SHARES = st.integers(0, 50).map(lambda number: number / 50)


@pytest.mark.parametrize(
    ("one", "other", "together", "factor"),
    [(1, 1, 2, 2.0), (1, 1, 1, 1.0), (1, 3, 3, 1.0), (3, 1, 4, 2.0), (1, 1, 1.5, 1.5), (1, 1, 5, 2.0), (0, 1, 1, 2.0)],
)
def test_slowdown(one, other, together, factor):
    assert slowdown(one, other, together) == pytest.approx(factor)


@given(st.lists(SHARES, min_size=1, max_size=4), st.lists(SHARES, min_size=1, max_size=4))
def test_fitted_shares_give_the_slowdowns_back(weight_gradients, others):
    measured = {
        (("W", i), ("X", j)): max(1.0, a + b) for i, a in enumerate(weight_gradients) for j, b in enumerate(others)
    }
    shares = fit_shares(measured)
    for (one, other), factor in measured.items():
        assert max(1.0, shares[one] + shares[other]) == pytest.approx(factor, abs=0.021)  # shares are multiples of 0.02


def test_nothing_is_promised_that_was_not_seen():
    assert fit_shares({("W", "X"): 2.0}) == {"W": 1.0, "X": 1.0}
    fitted = fit_shares({("W", "X"): 1.0})
    assert fitted["W"] + fitted["X"] == pytest.approx(1.0)
    assert fit_shares({}) == {}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 9))
def test_groups_hold_every_layer_once_in_order(seconds, most):
    groups = equal_groups(seconds, most)
    assert [i for group in groups for i in group] == list(range(len(seconds)))
    assert all(len(group) > 0 for group in groups)


def test_groups_take_about_as_long_as_each_other():
    assert equal_groups([1.0] * 12, 4) == [range(3), range(3, 6), range(6, 9), range(9, 12)]
    assert equal_groups([8.0, 1.0, 1.0], 2) == [range(1), range(1, 3)]
