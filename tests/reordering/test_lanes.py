"""Weight gradients on a second stream, and which stream waits for which: with streams that are played on the CPU."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim

from gradweave._runtime import buckets
from gradweave.fusion import fuse
from gradweave.reordering.api import reorder
from gradweave.reordering.deferred_gradients import DeferredLayerGradients
from gradweave.reordering.lanes import SideStreamLane
from played_streams import Races, as_if_on_a_gpu, put_updates_on_a_gpu, run_as_if_on_a_gpu
from reordering.test_cross_step import crossing_costs, net


@pytest.fixture
def races(monkeypatch):
    """With a bucket for each parameter."""
    put_updates_on_a_gpu(monkeypatch)
    run_as_if_on_a_gpu(monkeypatch, DeferredLayerGradients, "__init__")
    monkeypatch.setattr(buckets, "CPU_BUCKET_BYTES", {"forward": 1, "backward": 1})
    return Races(monkeypatch)


def train(races=None, *, mode=None, policy="side_stream", **options):
    """Weights after some steps; with ``races`` reordered as if on a GPU."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    if races is not None:
        if mode is not None:
            fuse(model, optimizer, mode)
        costs = None if policy == "side_stream" else crossing_costs(model)
        with as_if_on_a_gpu():
            reorder(model, policy, costs=costs, **options)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with races or nullcontext():
        for _ in range(4):
            model(x).square().mean().backward()
            assert all(p.isfinite().all() for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return [p + 0 for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"byte_budget": 0},
        {"policy": "joint"},
        {"mode": "forward"},
        {"mode": "forward", "policy": "cross_step"},
        {"mode": "backward"},
    ],
    ids=lambda options: ", ".join(map(str, options.values())) or "plain",
)
def test_no_stream_reads_what_another_still_computes(races, options):
    expected = train()
    made = train(races, **options)
    assert races.found == []
    assert min(races.streams.values()) >= 48  # two operations for each of six layers in four steps
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


def test_gradients_that_another_stream_asks_for_first(races):
    """They cross into the next forward; both the stream that reads them before and the one that goes on wait."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, foreach=False)
    fuse(model, optimizer, "forward")
    with as_if_on_a_gpu():
        handle = reorder(model, "cross_step", costs=crossing_costs(model))
    other = torch.cuda.Stream()
    with races:
        for _ in range(4):
            model(torch.ones(3, 4)).square().mean().backward()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                norms = [p.grad.norm() for p in model.parameters()]
            torch.stack([p.grad.norm() for p in model.parameters()])
            torch.cuda.current_stream().wait_stream(other)
            torch.stack(norms)
            optimizer.step()
            optimizer.zero_grad()
    assert handle._cross_step_deferral.crossed > 0
    assert races.found == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("slow", ["main", "side"])
@pytest.mark.parametrize("mode", [None, "forward", "backward"])
def test_a_stream_of_a_gpu_that_is_slow_is_waited_for(slow, mode, monkeypatch):
    """Either stream is slow in turn, so that code that does not wait for it reads what is not there yet."""
    start = SideStreamLane.start

    def start_slowly(self, task):
        with torch.cuda.stream(self.stream if slow == "side" else torch.cuda.current_stream()):
            torch.cuda._sleep(2_000_000)
        start(self, task)

    monkeypatch.setattr(SideStreamLane, "start", start_slowly)

    def run(woven):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).cuda()
        optimizer = optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if woven and mode is not None:
            fuse(model, optimizer, mode)
        handle = reorder(model, "side_stream") if woven else None
        x = torch.randn(64, 256, device="cuda")
        for _ in range(5):
            loss = model(x).square().mean()
            if slow == "main":
                torch.cuda._sleep(20_000_000)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert handle is None or handle.most_bytes_held > 0
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))
