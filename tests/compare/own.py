"""Workloads of the tests' own."""

import math

from torch import nn

from gradweave.compare.workloads import WORKLOADS, Workload


def own(make_model, make_data=None):
    base = WORKLOADS["autoencoder"]
    return Workload("own", make_model, make_data or base.make_data, base.loss)


def small():
    return nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64))


class Spoilt(nn.Module):
    """Returns NaN after a number of calls."""

    def __init__(self, calls):
        super().__init__()
        self.inner, self.left = small(), calls

    def forward(self, x):
        self.left -= 1
        return self.inner(x) * (1.0 if self.left >= 0 else math.nan)
