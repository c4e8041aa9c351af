"""What ranks learn of each other, and what they leave behind.

A function above a test runs on every rank, and returns what its test looks at.
"""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradweave.parallel.pipeline import Pipeline
from parallel.pipeline.models import batch, loss_fn, make
from parallel.pipeline.training import Failing, a_step, raised, refused

SOON = 8


@pytest.mark.parametrize("timeout", [-1, 0, "soon", float("nan"), float("inf")])
def test_a_timeout_that_is_wrong_on_one_rank_is_refused_by_all(two, timeout):
    for rank, found in two.run(refused, policy="modulo", different={"timeout": timeout}).items():
        assert f"timeout={timeout!r}: give a positive number of seconds" in found, (rank, found)


def a_loss_that_speaks_of_connections():
    """Return what a step raises where a user's loss fails with words that torch has for a lost rank."""

    def failing(output, target):
        raise RuntimeError("metrics server: connection refused, timed out")

    pipe = Pipeline(make("linears"), failing, microbatches=4, policy="fast_forward", timeout=20)
    return raised(lambda: pipe.step(*batch("linears")))


def test_words_of_a_user_are_not_taken_for_a_lost_rank(two):
    found = two.run(a_loss_that_speaks_of_connections)
    assert found[1].startswith("RuntimeError: metrics server: connection refused")
    assert "rank 1 failed with RuntimeError: metrics server" in found[0]


class Barrier(torch.autograd.Function):
    """An operation whose backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no way back")


class NoWayBack(nn.Module):
    """A layer whose backward fails, after the trial run."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) if self.calls == 1 else Barrier.apply(self.linear(x))


KEPT = []
"""Errors that a rank has caught."""


def a_failure_that_is_kept(layer):
    """Return the seconds until a rank knows that the first one has failed, while all keep the error they caught."""
    rest = (nn.Linear(6, 6) for _ in range(2 * dist.get_world_size() - 1))
    pipe = Pipeline(nn.Sequential(layer(), *rest), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    began = time.monotonic()
    try:
        pipe.step(*batch("mlp"))
    except Exception as error:
        KEPT.append(error)
    return time.monotonic() - began


@pytest.mark.parametrize("layer", [Failing, NoWayBack])
def test_others_know_of_a_failure_at_once_even_while_its_error_is_kept(three, layer):
    for rank, seconds in three.run(a_failure_that_is_kept, layer=layer).items():
        assert seconds < SOON, rank


def descriptors(count=4):
    """Return how many more files are open after some pipelines were used and closed; the store's close a bit later."""

    def opened():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = opened()
    for _ in range(count):
        pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
        pipe.step(*batch("linears"))
        pipe.close()
    ends = time.monotonic() + 5
    while opened() >= before + count and time.monotonic() < ends:
        time.sleep(0.05)
    return opened() - before


@pytest.mark.parametrize("tcp", [False, True])
def test_closed_pipelines_do_not_pile_up_open_files(fresh, tcp):
    for more in fresh(2, tcp=tcp).run(descriptors, count=4).values():
        assert more < 4


def closed_by_one():
    """Close on the first rank first; return the seconds that takes, and what a step of another pipeline raises."""
    pipe = Pipeline(make("linears"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    pipe.step(*batch("linears"))
    began = time.monotonic()
    if dist.get_rank() == 0:
        pipe.close()
    seconds = time.monotonic() - began
    dist.barrier()
    pipe.close()
    return seconds, a_step("linears", policy="fast_forward")


def test_closing_waits_for_nobody_for_long(two):
    found = two.run(closed_by_one)
    assert found[0][0] < SOON
    assert [message for _, message in found.values()] == [None, None]


def closed_between_groups():
    """Return what a pipeline of some ranks raises that is made after one of all ranks is closed.

    torch could give its group the name of another one.
    """
    some = dist.new_group([0, 1])
    mine = {"microbatches": 4, "policy": "fast_forward", "timeout": 20, "process_group": some}
    inside = dist.get_rank() < 2
    everybody = Pipeline(make("mlp"), loss_fn, microbatches=4, policy="fast_forward", timeout=20)
    if inside:
        first = Pipeline(make("linears"), loss_fn, **mine)
    everybody.step(*batch("mlp"))
    everybody.close()
    if not inside:
        return None
    first.close()
    second = Pipeline(make("linears"), loss_fn, **mine)
    message = raised(lambda: second.step(*batch("linears")))
    second.close()
    return message


def test_closing_does_not_free_a_name_that_torch_would_give_twice(fresh):
    assert set(fresh(3).run(closed_between_groups).values()) == {None}
