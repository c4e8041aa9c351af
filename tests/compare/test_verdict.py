import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradweave.compare.comparison import Comparison, Steps
from gradweave.compare.results import Result
from gradweave.compare.statistics import Ratio
from gradweave.compare.trial import Setting
from gradweave.compare.workloads import WORKLOADS


def row(
    label, difference=0.0, speed=1.0, claim=False, loss_difference=0.0, losses=(1.0,) * 10, is_finite=True, lr=0.01
):
    ratio = Ratio(speed, speed - 0.01, speed + 0.01)
    return Result(
        label, label, lr, (1.0, 1.0, 1.0), {}, 1.0, None, ratio, claim, difference, loss_difference, is_finite,
        list(losses),
    )  # fmt: skip


def verdict(*rows, again=0.0):
    results = (row("fused"), row("fused (again)", again), *rows)
    setting = Setting(WORKLOADS["autoencoder"])
    return Comparison(setting, results, (), (32, 32), 100, Steps(10, 20, 6), {"device": "cpu"}).verdict


def test_identical_weights_of_all_are_said_only_where_all_have_them():
    assert "all give identical weights;" in verdict(row("loop"), row("forward"))
    said = verdict(row("loop", 7e-3), row("forward"), row("backward"))
    assert "all give" not in said
    assert "identical weights: forward and backward; torch's own loop: weights 7e-03 off;" in said


@given(
    st.dictionaries(
        st.sampled_from(["loop", "foreach", "hook"]), st.sampled_from([0.0, 1e-7, 7e-3]), min_size=1, max_size=3
    ),
    st.sets(st.sampled_from(["backward", "forward", "reorder", "daso"])),
)
def test_every_row_that_is_off_is_named_with_its_distance(stock, woven):
    said = verdict(*(row(label, off) for label, off in stock.items()), *(row(label) for label in woven))
    for label, off in stock.items():
        assert (f"{label}: weights {off:.0e} off" in said) == (off > 0)
    assert ("all give identical weights" in said or "it gives identical" in said) == (not any(stock.values()))


def test_rows_that_are_faster_and_slower_beyond_the_noise_are_all_named():
    said = verdict(row("loop", speed=0.5, claim=True), row("backward", speed=0.91, claim=True), row("forward"))
    assert said.startswith("No mode is faster than fused beyond the noise (slower: loop 0.500x and backward 0.910x);")
    said = verdict(row("loop", speed=1.3, claim=True), row("backward", speed=1.2, claim=True), row("forward"))
    assert said.startswith("loop is 1.300x [1.290, 1.310] as fast as fused (faster too: backward 1.200x);")


def test_a_stock_run_that_differs_from_itself_is_said():
    said = verdict(row("forward", 2e-5), again=1e-5)
    assert "fused run twice ends 1e-05 off itself; forward: weights 2e-05 off" in said
    assert "do not use" not in said
    assert "forward did not train as fused did: do not use it here" in verdict(row("forward", 5e-5), again=1e-5)


def test_what_is_wrong_comes_first_and_no_speed_is_praised():
    said = verdict(row("forward", 0.1, speed=2.0, claim=True), row("backward", speed=1.5, claim=True))
    assert said.startswith("forward did not train as fused did: do not use it here (forward: weights 1e-01 off);")
    assert "as fast as" not in said


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([1.0, math.nan, math.nan], "eva at lr 0.01 broke down: the loss of step 2 is not finite;"),
        ([1.0, 1.0, 1.0], "eva at lr 0.01 broke down: its weights are not finite;"),
    ],
)
def test_what_is_not_finite_is_said_and_is_never_near(losses, message):
    broken = row("eva", math.inf, losses=losses, is_finite=False)
    said = verdict(row("forward"), broken)
    assert said.startswith(message)
    assert "inf" not in said.replace("finite", "")
    assert (broken.sameness, broken.identical) == ("not finite", False)
    assert broken.as_dict()["largest_difference"] is None


def test_rules_are_compared_at_rates_that_are_not_tuned():
    said = verdict(row("eva", 0.3, lr=0.04, losses=(0.5,) * 10))
    assert (
        "after 10 steps fused has a loss of 1 (adamw, lr 0.01) and, by another rule, eva 0.5 (lr 0.04, at 1.000x"
        in said
    )
    assert "none was tuned for this" in said
    assert "No mode that trains by the same rule is faster" in verdict(row("eva", 0.3), row("forward"))
