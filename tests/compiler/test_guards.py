"""What changes after a step was traced is never frozen in: one more graph, or an eager step."""

import random
import types
from typing import ClassVar

import numpy
import pytest
import torch
from torch import nn, optim
from torch.nn.utils import parametrize

import gradweave
from compiler.models import adamw, assert_identical, batches, loss_fn, make, train

FACTOR = 1.0


def factor():
    return FACTOR


class Scaled(optim.Optimizer):
    """Reads what a test says in its step."""

    classwide = 1.0

    def __init__(self, params, read):
        super().__init__(params, {"lr": 0.1, "nested": {"scale": [1.0]}})
        self.scale = 1.0
        self.settings = types.SimpleNamespace(scales=[1.0])
        self.rule = lambda: self.settings.scales[0]
        self.read = read

    @torch.no_grad()
    def step(self, closure=None):
        scale = READERS[self.read](self)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * scale, alpha=-group["lr"])


READERS = {
    "attribute": lambda o: o.scale,
    "attribute of an attribute": lambda o: o.settings.scales[0],
    "closure of an attribute": lambda o: o.rule(),
    "class variable": lambda o: o.classwide,
    "group": lambda o: o.param_groups[0]["nested"]["scale"][0],
    "global": lambda o: factor(),
    "default": lambda o: o.defaults["lr"] * 10,
}


def set_to(value, read, optimizer, monkeypatch):
    if read == "attribute":
        optimizer.scale = value
    elif read in ("attribute of an attribute", "closure of an attribute"):
        optimizer.settings.scales[0] = value
    elif read == "class variable":
        monkeypatch.setattr(Scaled, "classwide", value)
    elif read == "group":
        optimizer.param_groups[0]["nested"]["scale"][0] = value
    elif read == "global":
        monkeypatch.setitem(globals(), "FACTOR", value)
    else:
        optimizer.defaults["lr"] = value / 10


@pytest.mark.parametrize("read", READERS)
def test_what_an_optimizer_reads_is_what_it_is_now(read, monkeypatch):
    def run(lower):
        with monkeypatch.context() as patch:

            def each(number, model, optimizer):
                set_to((1.0, 1.0, 0.0, 0.5, 1.0, 1.0)[number], read, optimizer, patch)

            return train("mlp", lower, lambda p: Scaled(p, read), each=each)

    assert_identical(run("replay"), run(None))


def test_an_attribute_that_comes_back_needs_no_graph_again(monkeypatch):
    from gradweave.compiler import program

    made, trace = [], program.trace_step

    def counted(*args, **named):
        made.append(None)
        return trace(*args, **named)

    monkeypatch.setattr(program, "trace_step", counted)
    train("mlp", "replay", lambda p: Scaled(p, "attribute"), 8, each=lambda n, m, o: setattr(o, "scale", 1.0 + n % 2))
    assert len(made) == 2


class Counting(optim.SGD):
    """Counts where a graph does not: each is a place of its own."""

    calls = 0
    log: ClassVar[list] = []

    def __init__(self, params, where):
        super().__init__(params, lr=0.1)
        self.where, self.meter, self.numbers = where, types.SimpleNamespace(calls=0), []

    @torch.no_grad()
    def step(self, closure=None):
        if self.where == "class":
            Counting.calls += 1
        elif self.where == "class list":
            self.log.append(1)
        elif self.where == "object":
            self.meter.calls += 1
        else:
            self.numbers.append(1)
        rate = 1.0 + Counting.calls + len(self.log) + self.meter.calls + len(self.numbers)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / rate)


@pytest.mark.parametrize("where", ["class", "class list", "object", "list"])
def test_counts_outside_of_the_state_are_counted_once_a_step(where, warned):
    def run(lower):
        Counting.calls, Counting.log = 0, []
        model, optimizer, losses = train("mlp", lower, lambda p: Counting(p, where))
        counts = Counting.calls, len(Counting.log), optimizer.meter.calls, len(optimizer.numbers)
        return (model, optimizer, losses), counts

    made, expected = run("replay"), run(None)
    assert_identical(made[0], expected[0])
    assert made[1] == expected[1]
    assert len(warned()) == 1


class Around(optim.Optimizer):
    """Leaves the update to another optimizer."""

    def __init__(self, params):
        self.inner = optim.SGD(params, lr=0.1)
        super().__init__(self.inner.param_groups[0]["params"], {})

    def step(self, closure=None):
        return self.inner.step()


def test_an_optimizer_around_another_one_updates(warned):
    made, expected = (train("mlp", lower, Around) for lower in ("replay", None))
    assert torch.equal(made[2], expected[2])
    assert len(made[2].unique()) == len(made[2])
    assert len(warned()) == 1


def halve(p):
    p.grad.mul_(0.5)


def replaced_step(model, optimizer):
    step = optimizer.step
    optimizer.step = lambda: (model[0].weight.grad.mul_(0.0), step())[1]


def forward_hook(model, optimizer):
    return model[0].register_forward_hook(lambda module, args, out: out * 0.5)


def forward_pre_hook(model, optimizer):
    return model[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


def backward_hook(model, optimizer):
    return model[3].register_full_backward_hook(lambda module, given, out: (given[0] * -1,))


def backward_pre_hook(model, optimizer):
    return model[3].register_full_backward_pre_hook(lambda module, out: (out[0] * -1,))


def hook_on_all_modules(model, optimizer):
    return nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 0.9)


def gradient_hook(model, optimizer):
    return model[0].weight.register_hook(lambda grad: grad * 0.5)


def accumulate_hook(model, optimizer):
    return model[0].weight.register_post_accumulate_grad_hook(halve)


def step_hook(model, optimizer):
    return optimizer.register_step_pre_hook(lambda *_: halve(model[0].weight))


def step_hook_on_all(model, optimizer):
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    return register_optimizer_step_pre_hook(lambda *_: halve(model[0].weight))


def other_module(model, optimizer):
    model[1] = nn.Tanh()


def other_forward(model, optimizer):
    model[1].forward = torch.tanh


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized(model, optimizer):
    parametrize.register_parametrization(model[0], "weight", Doubled())


@pytest.mark.parametrize(
    "change",
    [
        forward_hook, forward_pre_hook, backward_hook, backward_pre_hook, hook_on_all_modules, gradient_hook,
        accumulate_hook, step_hook, step_hook_on_all, other_module, other_forward, parametrized, replaced_step,
    ],
)  # fmt: skip
def test_what_is_put_on_or_replaced_later_takes_effect_and_so_does_its_removal(change):
    def run(lower):
        handles = []

        def each(number, model, optimizer):
            if number == 3:
                handles.append(change(model, optimizer))
            if number == 5 and hasattr(handles[0], "remove"):
                handles[0].remove()

        made = train("mlp", lower, adamw, steps=8, each=each)
        if hasattr(handles[0], "remove"):
            handles[0].remove()
        return made

    made, expected = run("replay"), run(None)
    assert torch.equal(made[2], expected[2])
    for mine, theirs in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_class_that_is_patched_later(monkeypatch):
    def run(lower):
        with monkeypatch.context() as patch:

            def each(number, model, optimizer):
                if number == 3:
                    patch.setattr(nn.GELU, "forward", lambda self, x: torch.tanh(x))

            return train("mlp", lower, each=each)

    assert_identical(run("replay"), run(None))


class Pair(nn.Module):
    """Two layers that may have one memory for their weights, or a part of it."""

    def __init__(self, tie=None):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(48, 48) for _ in range(3))
        self.head = nn.Linear(48, 5)
        self.register_buffer("seen", torch.zeros(48))
        self.tie(tie)

    def tie(self, how):
        if how == "whole":
            self.two.weight.data = self.one.weight.data
        elif how == "overlapping":
            memory = torch.cat([self.one.weight.detach(), self.two.weight.detach()[:4]]).clone()
            self.one.weight.data, self.two.weight.data = memory[:48], memory[4:]
        elif how == "parameter":
            self.two.weight = self.one.weight
        elif how == "buffer":
            self.seen = self.two.bias.data

    def forward(self, x):
        self.seen.add_(0.01)
        return self.head(torch.tanh(self.three(torch.tanh(self.two(torch.tanh(self.one(x)))))))


@pytest.mark.parametrize("tie", ["whole", "overlapping", "parameter", "buffer"])
@pytest.mark.parametrize("when", ["before", "later"])
def test_weights_that_share_memory(tie, when):
    def run(lower):
        model = Pair(tie if when == "before" else None)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower) if lower else None
        losses = []
        for number, (x, y) in enumerate(batches(7)):
            if number == 3 and when == "later":
                model.tie(tie)
            if step:
                losses.append(step(x, y))
                continue
            losses.append(loss_fn(model, x, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, torch.stack(losses).detach()

    assert_identical(run("replay"), run(None))


OWN = random.Random(3)
GENERATOR = numpy.random.default_rng(3)
DRAWS = {
    "random": random.random,
    "randint": lambda: random.randint(1, 5),
    "choice": lambda: random.choice([1.0, 2.0]),
    "a generator of Python's": OWN.random,
    "numpy": lambda: float(numpy.random.rand()),
    "a generator of numpy's": GENERATOR.random,
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("where", ["loss", "optimizer"])
def test_numbers_of_python_and_numpy_are_fresh_and_their_own(draw, where, warned):
    class Drawing(optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"] * DRAWS[draw]())

    def drawing(model, x, y):
        return loss_fn(model, x, y) * DRAWS[draw]()

    def run(lower):
        random.seed(1)
        numpy.random.seed(1)
        OWN.seed(1)
        GENERATOR.bit_generator.state = numpy.random.default_rng(1).bit_generator.state
        if where == "loss":
            return train("mlp", lower, loss=drawing)
        return train("mlp", lower, lambda p: Drawing(p, lr=0.1))

    assert_identical(run("replay"), run(None))
    assert len(warned()) == 1


class Noisy(optim.SGD):
    """Draws noise with torch."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad + 0.01 * torch.randn_like(p), alpha=group["lr"])


def test_an_optimizer_that_draws_noise_is_replayed_in_its_order():
    assert_identical(*(train("mlp", lower, lambda p: Noisy(p, lr=0.1)) for lower in ("replay", None)))


class LateHead(nn.Module):
    """A head that has its first gradient later than the others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.late = nn.Linear(48, 8), nn.Linear(8, 5), nn.Linear(8, 5)
        self.use = False

    def forward(self, x):
        inner = torch.tanh(self.body(x))
        return self.head(inner) + (self.late(inner) if self.use else 0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lower", ["replay", "inductor"])
@pytest.mark.parametrize("change", ["late head", "cleared", "assigned"])
def test_step_counts_that_differ_and_state_that_is_reset(lower, change, warned):
    def run(lower):
        model = LateHead()
        optimizer = adamw(model.parameters())
        step = gradweave.compile(model, loss_fn, optimizer, lower=lower) if lower else None
        losses = []
        for number, (x, y) in enumerate(batches(8)):
            if number == 4 and change == "late head":
                model.use = True
            elif number == 4 and change == "cleared":
                optimizer.state.clear()
            elif number == 4:
                optimizer.state = type(optimizer.state)(dict)
            if step:
                losses.append(step(x, y))
                continue
            losses.append(loss_fn(model, x, y))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, torch.stack(losses).detach()

    made, expected = run(lower), run(None)
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)
    counts = [[float(o.state[p]["step"]) for p in o.state] for o in (made[1], expected[1])]
    assert counts[0] == counts[1]
    if lower == "replay":
        assert_identical(made, expected)
    assert not warned()


def test_momentum_that_is_switched_on_later():
    def each(number, model, optimizer):
        optimizer.param_groups[0]["momentum"] = 0.9 if number > 2 else 0.0

    assert_identical(*(train("mlp", lower, lambda p: optim.SGD(p, lr=0.1), each=each) for lower in ("replay", None)))


def test_stock_optimizers_cost_nothing_to_look_at():
    from gradweave.compiler.optimizer_reads import OptimizerReads

    model = make("mlp")
    for optimizer in (optim.SGD(model.parameters()), adamw(model.parameters()), gradweave.EvaS(model)):
        reads = OptimizerReads(optimizer)
        optimizer.anything = 1
        assert reads.unchanged()
