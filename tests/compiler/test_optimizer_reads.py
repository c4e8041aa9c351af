"""What an optimizer reads besides its state is never frozen in: one more graph, or an eager step."""

import types
from typing import ClassVar

import pytest
import torch
from torch import optim

import gradweave
from compiler.models import adamw, assert_identical, make, train

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


def test_stock_optimizers_cost_nothing_to_look_at():
    from gradweave.compiler.optimizer_reads import OptimizerReads

    model = make("mlp")
    for optimizer in (optim.SGD(model.parameters()), adamw(model.parameters()), gradweave.EvaS(model)):
        reads = OptimizerReads(optimizer)
        optimizer.anything = 1
        assert reads.unchanged()
