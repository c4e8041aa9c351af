"""auto: allowed modes follow from what the loop does; the fastest is kept; the result never changes."""

import logging

import pytest
import torch
from torch import nn

from fusion.loops import adamw, assert_same, batches, loss_of, make_net, train
from gradweave._runtime.ab_trial import RULES, ABTrial
from gradweave.fusion import fuse

SETTLED = 1 + 3 * RULES.rounds * RULES.steps


def run(mode, steps, before_step=None, micro=1, *, allow_backward=True):
    model = make_net()
    optimizer = adamw(model)
    fusion = fuse(model, optimizer, mode, allow_backward=allow_backward) if mode else None
    data = list(batches(steps * micro))
    for i in range(steps):
        for x, y in data[i * micro : (i + 1) * micro]:
            loss_of(model, x, y).backward()
        if before_step:
            before_step(model)
        optimizer.step()
        optimizer.zero_grad()
    explained, chosen = (fusion.explain(), fusion._engine.chosen) if fusion else ("", None)
    if fusion:
        fusion.detach()
    return (model, optimizer), explained, chosen


def clock(monkeypatch, seconds):
    """Make trials measure the given seconds of each mode, one number for all rounds or one for each."""

    def measured(trial):
        return [takes if isinstance(takes, list) else [takes] * RULES.rounds for takes in map(seconds.get, trial.ways)]

    monkeypatch.setattr(ABTrial, "seconds", measured)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"stock": 1.0, "forward": 0.9, "backward": 0.95}, "forward"),
        ({"stock": 1.0, "forward": 0.95, "backward": 0.9}, "backward"),
        ({"stock": 1.0, "forward": 0.9, "backward": 0.905}, "backward"),
        ({"stock": 1.0, "forward": 0.98, "backward": 1.1}, "stock"),
        ({"stock": 1.0, "forward": [0.9, 1.01, 0.9], "backward": 1.1}, "stock"),
        ({"stock": 1.0, "forward": 1.2, "backward": 1.1}, "stock"),
    ],
)
def test_the_fastest_is_kept_and_stock_unless_it_pays(monkeypatch, seconds, chosen):
    clock(monkeypatch, seconds)
    trained, explained, choice = run("auto", SETTLED + 5)
    assert choice == chosen
    assert f"chose {chosen}" in explained
    assert "the loop leaves gradients alone" in explained
    assert_same(trained, run(None, SETTLED + 5)[0])


@pytest.mark.parametrize(("forward", "chosen"), [(0.9, "forward"), (0.98, "stock")])
def test_backward_is_not_tried_unless_it_is_allowed(monkeypatch, forward, chosen):
    clock(monkeypatch, {"stock": 1.0, "forward": forward})  # any other mode is a KeyError
    trained, explained, choice = run("auto", SETTLED, allow_backward=False)
    assert choice == chosen
    assert "backward only with allow_backward=True" in explained
    assert ("3% faster, and faster in every round" in explained) == (chosen == "stock")
    assert_same(trained, run(None, SETTLED)[0])


def test_a_loop_that_clips_is_never_given_backward(monkeypatch):
    clock(monkeypatch, {"stock": 1.0, "forward": 0.5})

    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    trained, explained, choice = run("auto", SETTLED, clip)
    assert choice == "forward"
    assert "uses .grad" in explained
    assert_same(trained, run(None, SETTLED, clip)[0])


def test_a_loop_that_accumulates_is_never_given_backward(monkeypatch):
    clock(monkeypatch, {"stock": 1.0, "forward": 0.5})
    trained, explained, choice = run("auto", SETTLED, micro=2)
    assert choice == "forward"
    assert "accumulates" in explained
    assert_same(trained, run(None, SETTLED, micro=2)[0])


def test_the_choice_is_announced_once(monkeypatch, caplog):
    clock(monkeypatch, {"stock": 1.0, "forward": 0.71828, "backward": 2.0})
    with caplog.at_level(logging.INFO, logger="gradweave"):
        run("auto", SETTLED + 3)
    assert [r.getMessage().startswith("fuse: chose forward") for r in caplog.records] == [True]


def test_real_clocks_give_the_same_result():
    assert_same(train(adamw, steps=SETTLED + 5), train(adamw, "auto", steps=SETTLED + 5))


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9, 14])
def test_detaching_while_observing_or_measuring(steps):
    model = make_net()
    optimizer = adamw(model)
    fusion = fuse(model, optimizer, "auto", allow_backward=steps % 2 == 1)
    for i, (x, y) in enumerate(batches(20)):
        if i == steps:
            fusion.detach()
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same((model, optimizer), train(adamw, steps=20))


def test_reads_while_observing_see_true_gradients():
    seen, expected = [], []

    def look(into):
        return lambda model: into.append([p.grad.clone() for p in model.parameters()])

    run("auto", 3, look(seen))
    run(None, 3, look(expected))
    for mine, stock in zip(seen, expected, strict=True):
        assert all(type(a) is torch.Tensor and torch.equal(a, b) for a, b in zip(mine, stock, strict=True))


def test_a_model_that_is_traced_while_it_is_observed_stays_in_stock_order():
    model = make_net()
    fusion = fuse(model, adamw(model), "auto", allow_backward=True)
    for i, (x, y) in enumerate(batches(3)):
        loss_of(model, x, y).backward()
        if i == 0:
            torch.jit.trace(model, x)
            assert all(type(p.grad) is torch.Tensor for p in model.parameters())
        fusion.optimizer.step()
        fusion.optimizer.zero_grad()
        assert "chose stock (the model is traced" in fusion.explain()
    fusion.detach()
