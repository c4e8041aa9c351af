import pytest
import torch
from torch import nn

from gradweave.errors import ArgumentError
from gradweave.parallel.daso import DASO


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "fast"}, "mode='fast': use one of delta, paper"),
        ({"payload": "int8"}, "payload='int8'"),
        ({"pace": "x"}, "pace='x'"),
        ({"on_failure": "ignore"}, "on_failure='ignore'"),
        ({"every": 0}, "every=0: give at least 1"),
        ({"wait": -1}, "wait=-1: give at least 0"),
        ({"every": 2, "wait": 3}, "wait=3: give at most every=2"),
        ({"timeout": 0}, "timeout=0: give a positive"),
        ({"cool_down": 3}, "total=None: give the length"),
        ({"mode": "paper", "wait": 1}, "wait=1: is set by the published rules"),
        ({"rhythm": [(0, 1, 1)], "every": 2}, "rhythm=((0, 1, 1),): says when to exchange; leave out every and wait"),
        ({"rhythm": [(0, 2, 2)], "wait": 1}, "rhythm=((0, 2, 2),): says when to exchange"),
        ({"rhythm": [(0, 2, 4)]}, "rhythm=(0, 2, 4)"),
    ],
)
def test_bad_options(options, said):
    model = nn.Linear(1, 1)
    with pytest.raises(ArgumentError) as error:
        DASO(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    assert said in str(error.value)
