"""Which updates a step defers, and for which it stays in stock order."""

import copy

import pytest
import torch
from torch import nn, optim

from _runtime.deferred.comparison import pending, same, train
from fusion.loops import adamw, assert_same, batches, loss_of, make_net
from gradweave._runtime.deferred.deferred_updates import State
from gradweave.fusion import fuse


class Checked(optim.Optimizer):
    """Raises before it has updated anything, as a check for bad numbers or a full disk would."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.bad = False

    @torch.no_grad()
    def step(self, closure=None):
        if self.bad:
            raise ArithmeticError("skip this step")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize("after", ["zero_grad", "step again", "read the groups"])
def test_a_step_that_raises_has_not_happened(after):
    def run(mode):
        model = make_net()
        optimizer = Checked(model.parameters())
        fusion = fuse(model, optimizer, mode) if mode else None
        seen = []
        for i, (x, y) in enumerate(batches(8)):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.bad = i in (4, 5)
            try:
                optimizer.step()
            except ArithmeticError:
                optimizer.bad = False
                if after == "step again":
                    optimizer.step()
                elif after == "read the groups":
                    seen.append(len(copy.deepcopy(optimizer).param_groups[0]["params"]))
            seen.append([len(group["params"]) for group in optimizer.param_groups])
        if fusion:
            fusion.detach()
        return (model, optimizer), seen

    (expected, wanted), (trained, got) = run(None), run("forward")
    assert got == wanted
    assert_same(trained, expected)


def test_a_step_inside_of_a_mode_is_seen_by_it():
    """An example is the mode that copies tensors saved for backward before they are written."""

    def run(mode):
        model = make_net()
        optimizer = optim.SGD(model.parameters(), 0.1)
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(6):
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                before, later = loss_of(model, x, y), loss_of(model, 2 * x, y)
                for loss in (before, later):
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    assert not pending(model)
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))


class OwnRates(optim.Optimizer):
    """Reads a factor that parameters have as an attribute."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * getattr(p, "factor", 1.0))


def test_attributes_of_parameters_that_change_after_step_are_for_the_next():
    def change(i, model, *_):
        for p in model.parameters():
            p.factor = 1 / (2 + i)

    def make(model):
        for p in model.parameters():
            p.factor = 1.0
        return OwnRates(model.parameters())

    same(change, make=make)


class Owned(torch.Tensor):
    """A library's tensor that overrides functions before a parameter's class is consulted."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["keyword", "in a dictionary"])
def test_inputs_of_a_class_of_their_own_are_found_wherever_they_are(how):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x=None, *, batch=None):
            return self.layer(x if batch is None else batch["x"])

    def evaluate(i, model, optimizer, x):
        x = x.as_subclass(Owned)
        with torch.no_grad():
            return (model(x=x) if how == "keyword" else model(batch={"x": x})).as_subclass(torch.Tensor).tolist()

    torch.manual_seed(0)
    model = Net()
    (expected, wanted), (trained, got) = (
        train(mode, evaluate, model=copy.deepcopy(model)) for mode in (None, "forward")
    )
    assert got == wanted
    assert_same(trained, expected)


def test_one_gradient_of_two_parameters_is_used_at_once():
    def share(model):
        inner, twice = model.twice.bias, model.norm.bias
        inner.grad = twice.grad

    models = []
    for mode in (None, "forward"):
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(6):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            share(model)
            optimizer.step()
            model.norm.bias.sum()
            model.norm.bias.grad.mul_(2)
        if fusion:
            fusion.detach()
        models.append((model, optimizer))
    assert_same(*models)


def test_states_of_a_model_that_is_traced_in_mid_training():
    model = make_net()
    optimizer = adamw(model)
    states = []
    with fuse(model, optimizer, "forward") as fusion:
        for i, (x, y) in enumerate(batches(4)):
            if i == 2:
                torch.jit.trace(model, x)
            states.append(fusion._engine._updates.state)
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert states == [State.LEARNING, State.DEFERRING, State.STOPPED, State.STOPPED]
