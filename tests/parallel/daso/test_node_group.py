"""Ranks and nodes that run out of batches at different times."""

import pytest
import torch

COUNTS = [[5, 5, 5, 5], [9, 9, 4, 4], [6, 9, 9, 7], [0, 8, 3, 0], [0, 0, 7, 7], [0, 0, 0, 0]]
OPTIONS = [
    {"every": 3, "wait": 2},
    {"warm_up": 20},
    {"warm_up": 6, "every": 2, "wait": 1},
    {"total": 9, "cool_down": 3},
    {"total": 9, "cool_down": 4, "every": 2, "wait": 1},
    {},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("counts", COUNTS)
def test_uneven_counts_end_cleanly_with_the_same_weights(two_by_two, counts, options):
    found = two_by_two.run("uneven", counts=counts, **options)
    assert all(torch.equal(found[0][0], weights) for weights, _ in found.values())
    assert torch.isfinite(found[0][0]).all()
    assert all(steps >= max(counts) for _, steps in found.values())
