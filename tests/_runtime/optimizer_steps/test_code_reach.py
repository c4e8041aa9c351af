"""Optimizers whose code uses what a loop may change are found by reading the code, before any of it runs."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn, optim

from _runtime.optimizer_steps.test_independence import Simple
from fusion.loops import adamw, assert_same, batches, loss_of, make_net
from gradweave._runtime.optimizer_steps.code_reach import find_reach, is_torchs
from gradweave.errors import UnsupportedError
from gradweave.fusion import fuse

GENERATOR = torch.Generator()
SETTINGS = {"scale": 0.5}
LOG = []
FACTOR = 0.5
factor = 0.5


class DrawsWithNumPy(Simple):
    def direction(self, group, p):
        return p.grad + float(np.random.randn())


class DrawsFromItsOwnGenerator(Simple):
    def direction(self, group, p):
        return p.grad + torch.randn(p.shape, generator=GENERATOR)


class ReadsASetting(Simple):
    def direction(self, group, p):
        return p.grad * SETTINGS["scale"]


class ReadsAGlobalNumber(Simple):
    def direction(self, group, p):
        return p.grad * factor


class KeepsALog(Simple):
    def direction(self, group, p):
        LOG.append(p.shape)
        return p.grad


class CountsInItsClass(Simple):
    ticks = itertools.count(1)

    def direction(self, group, p):
        return p.grad / next(self.ticks)


class Config:
    scale = 0.5


class ReadsAClass(Simple):
    def direction(self, group, p):
        return p.grad * Config.scale


class ImportsWhenItRuns(Simple):
    def direction(self, group, p):
        import random

        return p.grad * random.random()


class ReadsItsClassByType(Simple):
    scale = 0.5

    def direction(self, group, p):
        return p.grad * type(self).scale


class ReadsItsClassByName(Simple):
    scale = 0.5

    def direction(self, group, p):
        return p.grad * sum(ReadsItsClassByName.scale for _ in range(2))


def make_with_a_closure():
    seen = []

    class RemembersInAClosure(Simple):
        def direction(self, group, p):
            seen.append(1)
            return p.grad

    return RemembersInAClosure


def helper(grad):
    return grad * SETTINGS["scale"]


class AsksAHelper(Simple):
    def direction(self, group, p):
        return helper(p.grad)


REACHING = [
    DrawsWithNumPy, DrawsFromItsOwnGenerator, ReadsASetting, ReadsAGlobalNumber, KeepsALog, CountsInItsClass,
    ReadsAClass, ImportsWhenItRuns, make_with_a_closure(), AsksAHelper, ReadsItsClassByType, ReadsItsClassByName,
]  # fmt: skip


@pytest.mark.parametrize("cls", REACHING)
def test_they_are_refused_and_nothing_of_them_has_run(cls):
    model = make_net()
    optimizer = cls(model.parameters())
    numpy_state, generator_state = np.random.get_state()[1].copy(), GENERATOR.get_state()
    with pytest.raises(UnsupportedError, match=cls.__name__):
        fuse(model, optimizer, "forward")
    assert find_reach(optimizer)
    assert (np.random.get_state()[1] == numpy_state).all()
    assert torch.equal(GENERATOR.get_state(), generator_state)
    assert LOG == []
    assert next(CountsInItsClass.ticks) == 1
    CountsInItsClass.ticks = itertools.count(1)


def clipped(value, most):
    return min(value, most)


class Plain(Simple):
    """Uses libraries, a helper, constants, a property, a number of its class and another class."""

    MOST = 1.0
    share = 1.0

    @property
    def half(self):
        return FACTOR

    def direction(self, group, p):
        one = sum(math.sqrt(clipped(4.0, type(self).MOST)) * self.share for _ in range(1))
        return p.grad * self.half * one if isinstance(p, nn.Parameter) else p.grad


def test_what_keeps_to_its_groups_and_state_passes():
    model = make_net()
    assert find_reach(Plain(model.parameters())) == ""
    fuse(model, Plain(model.parameters()), "forward").detach()


def test_a_step_put_into_a_class_of_torch_is_not_torchs(monkeypatch):
    optimizer = adamw(make_net())
    assert is_torchs(optimizer)
    stock, calls = optim.AdamW.step, []

    def counted(self, closure=None):
        calls.append(1)
        return stock(self, closure)

    counted.__wrapped__, counted.__module__ = stock, stock.__module__
    monkeypatch.setattr(optim.AdamW, "step", counted)
    assert not is_torchs(optimizer)
    assert "calls" in find_reach(optimizer)


def run(mode, make, step):
    model = make_net()
    optimizer = make(model.parameters())
    fusion = fuse(model, optimizer, mode) if mode else None
    for i, (x, y) in enumerate(batches(8)):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        closure()
        step(optimizer, i, closure)
    if fusion:
        fusion.detach()
    return model, optimizer


class Scaled(Simple):
    """Takes a number besides, with a default."""

    @torch.no_grad()
    def step(self, scale=1.0):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * scale)


class CallsTwice(Simple):
    """Calls its closure at the start and at the end."""

    @torch.no_grad()
    def step(self, closure=None):
        for _ in range(2 if closure else 1):
            if closure:
                with torch.enable_grad():
                    closure()
            self.update()

    def update(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


STEPS = {
    "by position": (Scaled, lambda optimizer, i, _: optimizer.step(0.1 * i) if i % 2 else optimizer.step()),
    "by name": (Scaled, lambda optimizer, i, _: optimizer.step(scale=0.1 * i) if i % 2 else optimizer.step()),
    "closure": (CallsTwice, lambda optimizer, i, closure: optimizer.step(closure) if i % 2 else optimizer.step()),
}


@pytest.mark.parametrize("mode", ["forward", "auto"])
@pytest.mark.parametrize("kind", STEPS)
def test_a_step_with_arguments_is_taken_with_them(kind, mode):
    assert_same(run(mode, *STEPS[kind]), run(None, *STEPS[kind]))


@pytest.mark.parametrize("kind", STEPS)
def test_backward_refuses_them_before_a_weight_has_changed(kind):
    make, step = STEPS[kind]
    model = make_net()
    optimizer = make(model.parameters())
    fuse(model, optimizer, "backward")
    x, y = next(batches(1))
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, x, y).backward()
    with pytest.raises(Exception, match='mode="backward" has updated by then'):
        step(optimizer, 1, lambda: None)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
