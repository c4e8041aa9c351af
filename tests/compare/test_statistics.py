import math
import random

import pytest

from gradweave.compare.statistics import Ratio, is_claim, paired_ratio, percentiles


def test_what_a_round_shares_cancels():
    generator = random.Random(1)
    busy = [math.exp(generator.gauss(0, 1)) for _ in range(20)]
    ratio = paired_ratio([2.0 * b for b in busy], busy)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    generator = random.Random(2)
    covered = 0
    for _ in range(200):
        noise = [(math.exp(generator.gauss(0, 0.1)), math.exp(generator.gauss(0, 0.1))) for _ in range(20)]
        ratio = paired_ratio([1.1 * a for a, _ in noise], [b for _, b in noise])
        covered += ratio.low <= 1.1 <= ratio.high
    assert 0.88 <= covered / 200 <= 1.0


def test_a_claim_must_exceed_the_difference_of_equals():
    same = Ratio(1.0, 0.97, 1.02)
    assert is_claim(Ratio(1.1, 1.05, 1.15), same)
    assert is_claim(Ratio(0.9, 0.85, 0.95), same)
    assert not is_claim(Ratio(1.03, 1.02, 1.04), same)
    assert not is_claim(Ratio(1.05, 0.99, 1.1), same)


def test_percentiles():
    assert percentiles(list(range(11))) == (2, 5, 8)
    assert percentiles([4.0]) == (4.0, 4.0, 4.0)
    assert all(math.isnan(value) for value in percentiles([]))
