"""Ranks that die, or have fewer batches than others, are an error on the others."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradweave.errors import GradweaveError
from gradweave.parallel.data_parallel import DataParallel
from parallel.data_parallel.loops import backward, finish
from parallel.data_parallel.models import make, optimizer_of
from worlds import World


@pytest.fixture
def doomed(tmp_path):
    world = World(tmp_path, 2, 1)
    yield world
    world.close()


def dies(*, policy, limit):
    """Let the second rank die in its third step; return the error of the first, and after how long it came."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    options = {"k": 2} if policy == "reverse_first_k" else {}
    wrapped = DataParallel(model, opt, policy=policy, timeout=limit, **options)
    began = time.monotonic()
    try:
        for step in range(8):
            began = time.monotonic()
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            backward(wrapped, "mlp", step)
            finish(opt)
        wrapped.flush()
    except GradweaveError as error:
        spent, again = time.monotonic() - began, ""
        try:
            wrapped.state_dict()
        except GradweaveError as second:
            again = type(second).__name__
        with warnings.catch_warnings(record=True):
            plain = wrapped.detach()
        whole = all(torch.isfinite(p).all() and type(p) is nn.Parameter for p in plain.parameters())
        torch.save(plain.state_dict(), "saved.pt")
        return {"said": str(error), "kind": type(error).__name__, "seconds": spent, "again": again, "whole": whole}
    return {"said": "", "kind": "", "seconds": 0.0}


@pytest.mark.parametrize("policy", ["in_order", "no_barrier", "reverse_first_k"])
def test_a_rank_that_dies_is_an_error_on_the_others(doomed, policy):
    doomed.ask(dies, range(2), policy=policy, limit=8)
    heard = doomed.answers([0])[0]
    assert heard["kind"] == "LostPeerError"
    assert "a rank is lost" in heard["said"]
    assert heard["seconds"] < 30
    assert heard["again"] == ("" if policy == "in_order" else "LostPeerError")
    assert heard["whole"]


def runs_out(*, limit):
    """Give the second rank fewer batches than the first; return the error."""
    model = make("mlp")
    opt = optimizer_of(model.parameters(), "sgd")
    wrapped = DataParallel(model, opt, policy="no_barrier", timeout=limit)
    try:
        for step in range(4 + 2 * (1 - dist.get_rank())):
            backward(wrapped, "mlp", step)
            finish(opt)
        wrapped.flush()
    except GradweaveError as error:
        return str(error)
    return ""


def test_a_rank_that_runs_out_of_batches_is_an_error_on_the_others(doomed):
    answers = doomed.run(runs_out, limit=3)
    assert "give every rank the same number of batches" in answers[0]
    assert answers[1] == ""
