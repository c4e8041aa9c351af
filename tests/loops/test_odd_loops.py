"""Random loops, with a technique attached and without: the same bit for bit, or refused in time."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from gradweave._runtime import ab_trial, buckets
from loops.judging import TECHNIQUES, check, clock
from loops.odd_loops import loops


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=TECHNIQUES)
def technique(request, monkeypatch):
    """A technique in small: several buckets of a tiny model, trials of a step each that end in a known choice."""
    monkeypatch.setattr(buckets, "CPU_BUCKET_BYTES", {"forward": 100, "backward": 100})
    made = TECHNIQUES[request.param]
    monkeypatch.setattr(ab_trial, "RULES", ab_trial.TrialRules(warm_up=1, timed=1, rounds=1))
    monkeypatch.setattr(ab_trial, "time", clock(made.faster))
    return made


def search(technique, count, number):
    """Looks for a loop that is not what it is in stock order."""

    @seed(number)
    @settings(
        max_examples=count, database=None, deadline=None, report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(loops())
    def holds(loop):
        check(loop, technique)

    holds()


def test_random_loops(technique, request):
    """Others for each technique, the same in each run."""
    search(technique, 10, list(TECHNIQUES).index(request.node.callspec.params["technique"]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_loops(technique):
    search(technique, 1000, 1000)
