"""policy="auto": attaches nothing on a CPU; on a GPU keeps what a trial or a prediction shows to pay."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn, optim

from gradweave import _logging
from gradweave._runtime.ab_trial import RULES, ABTrial
from gradweave._runtime.split_calls.queue import InlineLane
from gradweave.reordering import auto
from gradweave.reordering.api import Reordering, ReorderingState, is_reordered, reorder
from gradweave.reordering.auto import Trial, predicted
from gradweave.schedule.costs import Costs, LayerCost
from gradweave.schedule.tasks import Demand

STEPS = 2 * RULES.rounds * RULES.steps


@pytest.fixture(autouse=True)
def _forget_announcements():
    _logging._log_once.cache_clear()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def clock(monkeypatch, stock, split):
    """Makes forward and backward take the given times, in all rounds or by round, as far as the trial can see."""
    seconds = [takes if isinstance(takes, list) else [takes] * RULES.rounds for takes in (stock, split)]
    monkeypatch.setattr(ABTrial, "seconds", lambda _: seconds)


def train(handle_of, steps, loop=lambda model, x: model(x).square().sum().backward()):
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    handle = handle_of(model)
    for number in range(steps):
        loop(model, torch.full((3, 4), 0.1 * number))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], handle


def tried(model):
    return Reordering(model, InlineLane(), None, trial=Trial(torch.device("cpu")))


@pytest.mark.parametrize(
    ("stock", "split", "chosen"),
    [
        (1.0, 0.9, "side_stream"),
        (1.0, 0.98, "stock"),
        (1.0, [0.9, 1.01, 0.9], "stock"),
        (1.0, 1.2, "stock"),
    ],
)
def test_what_pays_in_every_round_is_kept(monkeypatch, caplog, stock, split, chosen):
    clock(monkeypatch, stock, split)
    with caplog.at_level(logging.INFO, "gradweave"):
        made, handle = train(tried, STEPS + 3)
    assert handle._trial.chosen == chosen
    assert handle._trial.splits == (chosen == "side_stream")
    assert handle.state is (ReorderingState.LEFT_ALONE if chosen == "stock" else ReorderingState.ATTACHED)
    assert "1000.000 ms in stock order" in handle.explain()
    assert ("left alone" in handle.explain()) == (chosen == "stock")
    assert [r.message for r in caplog.records] == [f"reorder: {handle._trial.describe()}"]
    expected, _ = train(lambda model: None, STEPS + 3)
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


def test_both_are_really_tried():
    _, handle = train(tried, STEPS)
    assert handle._trial.chosen is not None
    measured = handle._trial._trial.seconds()
    assert [len(times) for times in measured] == [RULES.rounds, RULES.rounds]
    assert all(seconds > 0 for times in measured for seconds in times)
    assert handle.most_bytes_held > 0


def test_evaluation_and_several_forwards_for_one_backward_are_one_step(monkeypatch):
    clock(monkeypatch, 1.0, 0.5)

    def loop(model, x):
        with torch.no_grad():
            model(x)
        (model(x).sum() + model(2 * x).sum()).backward()

    _, handle = train(tried, STEPS - 1, loop)
    assert handle._trial.chosen is None
    assert handle.state is ReorderingState.TRYING
    assert "1 turns to go" in handle.explain()
    _, handle = train(tried, STEPS, loop)
    assert handle._trial.chosen == "side_stream"


def test_forwards_without_backward_end_the_trial():
    model = net()
    handle = tried(model)
    for _ in range(auto.PATIENCE + 1):
        model(torch.ones(1, 4))
    assert handle._trial.chosen == "stock"
    assert "no backward" in handle.explain()


def test_a_forward_that_fails_is_not_timed(monkeypatch):
    model = net()
    handle = tried(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert not handle._trial._is_in_step
    model(torch.ones(1, 4)).sum().backward()
    assert handle._trial._trial._steps == 1


def test_nothing_is_installed_on_a_cpu(caplog):
    model = net()
    with caplog.at_level(logging.INFO, "gradweave"):
        handle = reorder(model)
    assert "a CPU has no second stream" in caplog.text
    assert "left alone" in handle.explain()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not is_reordered(model)
    model(torch.ones(1, 4)).sum().backward()
    assert handle.most_bytes_held == 0
    handle.detach()
    assert handle.explain() == "detached: stock order"
    with reorder(model, costs=Costs.uniform(2)):
        assert not is_reordered(model)


def costs_with(weight_gradients, others):
    layer = LayerCost("", 1.0, 1.0, 1.0, 0.1, 1, 1, 1, "", others, others, weight_gradients, others)
    return Costs(tuple(layer for _ in range(4)))


def test_costs_predict_whether_it_pays():
    full, half = Demand(1.0, 1.0), Demand(0.5, 0.5)
    pays, reason = predicted(costs_with(half, half))
    assert pays
    assert "in stock order" in reason
    assert not predicted(costs_with(full, full))[0]
    assert not predicted(costs_with(Demand(0.99, 0.5), full))[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_trial_on_a_gpu_ends_with_a_choice():
    model = net().cuda()
    handle = reorder(model)
    assert is_reordered(model)
    for _ in range(STEPS):
        model(torch.ones(3, 4, device="cuda")).sum().backward()
    assert handle._trial.chosen in ("stock", "side_stream")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_that_is_captured_before_the_trial_is_over_is_left_alone():
    model = net().cuda()
    handle = reorder(model)
    x = torch.ones(3, 4, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        model(x).sum().backward()
    side.synchronize()
    model.zero_grad()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x).sum().backward()
    assert handle._trial.chosen == "stock"
    assert "captured" in handle.explain()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_costs_decide_on_a_gpu_without_a_trial(share):
    model = net().cuda()
    demand = Demand(share, share)
    layer = LayerCost("0", 1.0, 1.0, 1.0, 0.1, 1, 1, 1, "", demand, demand, demand, demand)
    handle = reorder(model, costs=Costs((layer, replace(layer, name="2"))))
    assert is_reordered(model) == (share < 1)
    assert ("left alone" in handle.explain()) == (share == 1.0)
