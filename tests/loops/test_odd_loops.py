"""Random loops with a technique attached: the result of stock order, bit for bit, or a timely refusal."""

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
    """A technique scaled down: several buckets for a tiny model, and trials of one step with a known winner."""
    monkeypatch.setattr(buckets, "CPU_BUCKET_BYTES", {"forward": 100, "backward": 100})
    made = TECHNIQUES[request.param]
    monkeypatch.setattr(ab_trial, "RULES", ab_trial.TrialRules(warm_up=1, timed=1, rounds=1))
    monkeypatch.setattr(ab_trial, "time", clock(made.faster))
    return made


def search(technique, count, number):
    """Search for a loop whose result differs from stock order."""

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
    """The loops differ between techniques, and are the same in each run."""
    search(technique, 10, list(TECHNIQUES).index(request.node.callspec.params["technique"]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_loops(technique):
    search(technique, 1000, 1000)
