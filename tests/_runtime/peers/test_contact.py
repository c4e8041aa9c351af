"""Only messages that failed are a lost peer; what a device, a layer or a hook raises is passed on as it is."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradweave._runtime.peers.contact import in_a_line, is_lost_contact, lost_contact_as
from gradweave.errors import GradweaveError, LostPeerError
from gradweave.parallel.data_parallel import DataParallel
from worlds import World

SOON = 20


@pytest.fixture
def doomed(tmp_path):
    world = World(tmp_path, 2, 1)
    yield world
    world.close()


def lost(reason):
    return LostPeerError(f"a peer is lost: {reason}", ranks=(1,), step=3)


def loses_its_peer(how):
    """End the second rank; return what the first one's message to it raises, and after how many seconds."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    dist.barrier(group)
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SOON)
    began = time.monotonic()
    try:
        with lost_contact_as(lost):
            if how == "silent, received from":
                dist.recv(torch.ones(3), src=1, group=group)
            else:
                dist.all_reduce(torch.ones(3), group=group)
    except GradweaveError as error:
        return type(error).__name__, str(error), error.ranks, error.step, time.monotonic() - began
    return None


@pytest.mark.parametrize("how", ["killed", "silent", "silent, received from"])
def test_a_peer_that_is_killed_or_silent_is_lost(doomed, how):
    doomed.ask(loses_its_peer, [0, 1], how=how)
    kind, message, ranks, step, seconds = doomed.answers([0])[0]
    assert kind == "LostPeerError"
    assert message.startswith("a peer is lost: RuntimeError: ")
    assert (ranks, step) == ((1,), 3)
    assert seconds < SOON


def raised_inside(call):
    """Return the error that a call inside of the context ends with."""
    try:
        with lost_contact_as(lost):
            call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def raised_by(module, error):
    """Return a function of a module that raises."""
    names = {"__name__": module, "error": error}
    exec("def call():\n    raise error", names)
    return names["call"]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: the launch timed out and was terminated"),
        torch.AcceleratorError("CUDA error: the launch timed out and was terminated"),
        torch.OutOfMemoryError("CUDA out of memory; the connection timed out"),
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error, NCCL version 2.27"),
        dist.DistBackendError("NCCL error: ncclInvalidUsage, invalid usage: duplicate GPU detected"),
        NotImplementedError("gloo connection: no such operation"),
        RuntimeError("ProcessGroupGloo::allreduce: invalid tensor type"),
        ValueError("connection reset by peer"),
    ],
    ids=str,
)
def test_errors_of_the_device_and_of_arguments_are_passed_on_as_they_are(error):
    for module in ("torch.distributed.distributed_c10d", "gradweave.parallel.data_parallel.reducer"):
        assert raised_inside(raised_by(module, error)) is error
        assert not is_lost_contact(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:9"),
        dist.DistNetworkError("The client socket has timed out after 3000ms"),
        dist.DistStoreError("wait timeout after 300ms, keys: /a"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("module", "is_lost"),
    [("torch.distributed.distributed_c10d", True), ("gradweave.parallel", True), ("gradweave_plugin", False),
     ("torch.nn.modules.linear", False), ("__main__", False)],
)  # fmt: skip
def test_words_count_only_from_code_that_sends_messages(error, module, is_lost):
    found = raised_inside(raised_by(module, error.with_traceback(None)))
    assert isinstance(found, LostPeerError) == is_lost
    assert found.__cause__ is error if is_lost else found is error


def test_the_root_cause_decides():
    def wrapped():
        try:
            raised_by("torch.distributed.distributed_c10d", RuntimeError("Connection reset by peer"))()
        except RuntimeError as error:
            raise RuntimeError("stage 2 failed") from error

    found = raised_inside(wrapped)
    assert isinstance(found, LostPeerError)
    assert in_a_line(found) == "RuntimeError: Connection reset by peer"


@pytest.mark.parametrize("where", ["a layer", "a hook", "a hook on a gradient"])
def test_errors_of_a_layer_or_a_hook_under_data_parallel_are_its_users(where):
    def fails(*_):
        raise RuntimeError("metrics server: connection refused, timed out")

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DataParallel(model, optimizer, policy="no_barrier")
    if where == "a layer":
        model[1].forward = fails
    elif where == "a hook":
        model[1].register_forward_hook(fails)
    else:
        model[0].weight.register_hook(fails)
    with pytest.raises(RuntimeError, match="metrics server: connection refused") as caught:
        wrapped(torch.ones(1, 2)).sum().backward()
    assert not isinstance(caught.value, GradweaveError)
    assert not is_lost_contact(caught.value)
    wrapped.detach()
