"""Fusion's second stream, and the streams that wait for it, simulated on the CPU."""

from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch import optim

from fusion.loops import assert_same, batches, loss_of, make_net
from gradweave.fusion import fuse
from played_streams import Races, put_updates_on_a_gpu


@pytest.fixture
def races(monkeypatch):
    put_updates_on_a_gpu(monkeypatch)
    return Races(monkeypatch)


def train(fused=lambda *_: nullcontext(), before_forward=lambda model: None, before_step=lambda: None):
    """Train in stock order, or in the context that ``fused`` returns for a model and its optimizer."""
    model = make_net()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with fused(model, optimizer):
        for x, y in batches(4):
            before_forward(model)
            loss_of(model, x, y).backward()
            before_step()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def forward_fused(races):
    """Forward fusion as on a GPU, where updates are launched and waited for."""

    def fused(model, optimizer):
        fusion = fuse(model, optimizer, "forward")
        stack = ExitStack()
        for context in (races, fusion):
            stack.enter_context(context)
        return stack

    return fused


def test_updates_run_on_a_second_stream_after_gradients_and_before_uses(races):
    expected = train()
    assert_same(train(forward_fused(races)), expected)
    assert races.found == []
    _, on_side = races.streams.values()
    assert on_side > 50


def test_weights_that_another_stream_has_asked_for_first(races):
    """The training stream waits together with the stream that uses the weight first."""
    other = torch.cuda.Stream()

    def look(model):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            model.head.weight + model.inner.weight.sum()

    def wait():
        torch.cuda.current_stream().wait_stream(other)

    train(forward_fused(races), look, wait)
    assert races.found == []
    assert races.streams[other] > 4
