"""Gradients after step(), and loops that skip steps: the result of stock order, or a refusal before it differs."""

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from fusion.loops import adamw, announce_again, assert_same, batches, loss_of, make_net
from gradweave._runtime.ab_trial import RULES, ABTrial
from gradweave.errors import GradweaveError
from gradweave.fusion import fuse

LONG = 1 + 2 * RULES.rounds * RULES.steps + 10


@pytest.fixture(params=["forward", "auto", "auto that chose forward"])
def mode(request, monkeypatch):
    """A mode in which a loop has the result of stock order, whatever it does."""
    if request.param == "auto that chose forward":
        monkeypatch.setattr(ABTrial, "paying", lambda _: ["forward"])
    return request.param.split()[0]


def sgd(model):
    return optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(mode, odd, steps=LONG, make=adamw):
    """Run ``odd(i, model, optimizer, loss)`` after each forward; it does the rest of the step."""
    model = make_net()
    optimizer = make(model)
    fusion = fuse(model, optimizer, mode) if mode else None
    seen = []
    for i, (x, y) in enumerate(batches(steps)):
        seen.append(odd(i, model, optimizer, loss_of(model, x, y)))
    if fusion:
        fusion.detach()
    return (model, optimizer), seen


def same(mode, odd, **more):
    (expected, wanted), (trained, got) = train(None, odd, **more), train(mode, odd, **more)
    assert got == wanted
    assert_same(trained, expected)


def test_they_can_be_read_after_step(mode):
    def odd(i, model, optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [float(p.grad.norm()) for p in model.parameters()] if i % 3 == 0 else None

    same(mode, odd)


def test_they_can_be_changed_after_step(mode):
    def odd(i, model, optimizer, loss):
        loss.backward()
        optimizer.step()
        if i % 3 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if i % 3 == 1:
            optimizer.zero_grad(set_to_none=i % 2 == 0)

    same(mode, odd)


def test_those_that_the_loop_has_kept_can_be_changed_after_step(mode):
    def odd(i, model, optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        kept = [p.grad for p in model.parameters()]
        optimizer.step()
        for grad in kept:
            grad.zero_()
        return [p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True)]

    same(mode, odd)


def test_a_step_adds_to_them_without_zero_grad(mode):
    def odd(i, model, optimizer, loss):
        if i % 4 == 0:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    same(mode, odd, make=sgd)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_batches_that_are_skipped_because_they_are_not_finite(mode, kind):
    def odd(i, model, optimizer, loss):
        optimizer.zero_grad()
        if i in (0, 1, 5, 9, 13, 17, 21, 25, 33, 37):
            loss = loss * torch.nan
        loss.backward()
        if kind == "loss" and not torch.isfinite(loss):
            return
        if kind == "gradient" and not all(p.grad.isfinite().all() for p in model.parameters()):
            return
        optimizer.step()

    same(mode, odd)


def _decay_by_hand(i, model):
    for p in model.parameters():
        p.data.mul_(0.999)


def _convert_to_itself(i, model):
    model.float()


RARE = {
    "statistics now and then": lambda i, model: (
        sum(float(p.grad.norm()) for p in model.parameters()) if i % 7 == 6 else None
    ),
    "clipping that begins late": lambda i, model: (
        float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)) if i > 11 else None
    ),
    "weights changed through .data": _decay_by_hand,
    "another precision": _convert_to_itself,
}


@pytest.mark.parametrize("rare", RARE)
def test_what_a_loop_does_rarely(mode, rare):
    def odd(i, model, optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        seen = RARE[rare](i, model)
        optimizer.step()
        return seen

    same(mode, odd)


def test_accumulation_that_begins_late(mode):
    def odd(i, model, optimizer, loss):
        loss.backward()
        if i < 12 or i % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()

    same(mode, odd)


def test_one_backward_thrown_away_before_another(mode):
    def odd(i, model, optimizer, loss):
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    same(mode, odd)
    with pytest.raises(GradweaveError, match="cleared without a step"):
        train("backward", odd)


@pytest.mark.parametrize("clearing", [True, False])
def test_a_model_converted_in_mid_training(mode, clearing):
    def run(mode):
        model = make_net()
        optimizer = sgd(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        for i, (x, y) in enumerate(batches(LONG)):
            loss_of(model, x.to(model.scale.dtype), y).backward()
            optimizer.step()
            if i == 9 and not clearing:
                model.double()
            optimizer.zero_grad()
            if i == 9 and clearing:
                model.double()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run(mode), run(None))


def test_gradients_that_are_parts_of_one_buffer(mode):
    def run(mode):
        model = make_net()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        fusion = fuse(model, optimizer, mode) if mode else None
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad = part.view(p.shape)
        for i, (x, y) in enumerate(batches(LONG)):
            if i % 2:
                flat.zero_()
            else:
                optimizer.zero_grad(set_to_none=False)
            loss_of(model, x, y).backward()
            flat.mul_(min(1.0, 0.05 / float(flat.norm())))
            optimizer.step()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run(mode), run(None))
    with pytest.raises(GradweaveError, match="shares its memory"):
        run("backward")


def train_with_gradients_of_its_own(mode, start, *, of_one_buffer, **options):
    """Moves gradients to its own buffer from some step on, and scales them there between backward and step."""
    model = make_net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    fusion = fuse(model, optimizer, mode, **options) if mode else None
    sizes = [p.numel() for p in model.parameters()]
    places = torch.zeros(sum(sizes)).split(sizes) if of_one_buffer else [torch.zeros(size) for size in sizes]
    places = [place.view(p.shape) for place, p in zip(places, model.parameters(), strict=True)]
    seen = []
    for i, (x, y) in enumerate(batches(LONG)):
        if i == start:
            for p, place in zip(model.parameters(), places, strict=True):
                p.grad = place
        optimizer.zero_grad(set_to_none=i < start)
        loss_of(model, x, y).backward()
        if i >= start:
            places[0].mul_(0.5)
        optimizer.step()
        seen.append([place.tolist() for place in places])
    if fusion:
        fusion.detach()
    return model, optimizer, seen


@pytest.mark.parametrize("of_one_buffer", [True, False])
def test_gradients_that_the_loop_keeps(of_one_buffer):
    """In backward mode they are refused in the first step, and left to step() in later ones."""
    with pytest.raises(GradweaveError, match=r"a \.grad is kept by the loop"):
        train_with_gradients_of_its_own("backward", 0, of_one_buffer=of_one_buffer)
    for start, mode, options in (
        (0, "forward", {}),
        (0, "auto", {"allow_backward": True}),
        (5, "forward", {}),
        (5, "backward", {}),
    ):
        expected = train_with_gradients_of_its_own(None, start, of_one_buffer=of_one_buffer)
        trained = train_with_gradients_of_its_own(mode, start, of_one_buffer=of_one_buffer, **options)
        assert_same(trained[:2], expected[:2])
        assert trained[2] == expected[2], (start, mode)


def test_weights_changed_through_data_are_refused_under_backward_before_they_differ():
    def odd(i, model, optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.data.mul_(0.999)
        optimizer.step()

    with pytest.raises(GradweaveError, match=r"changed through \.data"):
        train("backward", odd)


def test_turns_of_a_generator_and_a_discriminator(mode):
    def run(mode):
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        judge = nn.Sequential(nn.Linear(3, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        optimizers = [optim.Adam(model.parameters(), 2e-3) for model in (generator, judge)]
        fusions = (
            [fuse(model, o, mode) for model, o in zip((generator, judge), optimizers, strict=True)] if mode else []
        )
        for z, _ in batches(LONG):
            judge.zero_grad()
            F.softplus(-judge(z[:, :3])).mean().backward()
            fake = generator(z)
            F.softplus(judge(fake.detach())).mean().backward()
            optimizers[1].step()
            generator.zero_grad()
            F.softplus(-judge(fake)).mean().backward()  # leaves gradients in the judge
            optimizers[0].step()
        for fusion in fusions:
            fusion.detach()
        return [p.detach() for model in (generator, judge) for p in model.parameters()]

    assert all(torch.equal(p, q) for p, q in zip(run(mode), run(None), strict=True))


def test_auto_says_once_that_an_optimizer_keeps_it_in_stock_order(caplog):
    class Logs(optim.AdamW):
        last = 0.0

        def step(self, closure=None):
            self.last = sum(float(p.grad.norm()) for p in self.param_groups[0]["params"] if p.grad is not None)
            return super().step(closure)

    def odd(i, model, optimizer, loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return optimizer.last

    announce_again()
    with caplog.at_level("WARNING", logger="gradweave"):
        same("auto", odd, make=lambda model: Logs(model.parameters(), lr=0.01))
    assert len(caplog.records) == 1
