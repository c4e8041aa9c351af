"""Weight gradients on a second stream, and who waits for whom: with streams that are played on the CPU."""

from contextlib import nullcontext

import pytest
import torch
from torch import optim

from gradweave.fusion import buckets, fuse
from gradweave.fusion.forward import ForwardEngine
from gradweave.split.attach import reorder
from gradweave.split.handed_on import HandedOn
from played_streams import Races, as_if_on_a_gpu, run_as_if_on_a_gpu
from split.test_crossing import crossing_costs, net


@pytest.fixture
def races(monkeypatch):
    """Updates are seen, too."""
    monkeypatch.setattr("gradweave.fusion.forward.without_dispatch_modes", nullcontext)
    run_as_if_on_a_gpu(monkeypatch, ForwardEngine, "_launch", "_make_visible")
    run_as_if_on_a_gpu(monkeypatch, HandedOn, "__init__")
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
def test_nobody_is_ahead_of_what_is_computed_beside(races, options):
    expected = train()
    made = train(races, **options)
    assert races.found == []
    assert min(races.streams.values()) >= 48  # two operations for each of six layers in four steps
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


def test_gradients_that_another_stream_asks_for_first(races):
    """They cross into the next forward; who looks at them before waits, and so does who goes on."""
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
    assert handle._crossing.crossed > 0
    assert races.found == []
