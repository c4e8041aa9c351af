"""The comparison that most tests look at."""

import pytest

from gradweave.compare import compare
from gradweave.compare.trial import Setting
from gradweave.compare.workloads import WORKLOADS


@pytest.fixture(scope="session")
def comparison():
    return compare(
        Setting(WORKLOADS["autoencoder"], batch=64),
        ["loop", "hook", "backward", "forward", "reorder", "daso", "data_parallel"],
        steps=20,
    )
