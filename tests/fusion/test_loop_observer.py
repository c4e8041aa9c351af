"""One step in stock order shows what a loop does with its gradients, without changing its result."""

import pytest
import torch
from torch import nn, optim

from gradweave.fusion.loop_observer import LoopObserver


def halve(model, _):
    with torch.no_grad():
        model.weight.mul_(0.5)


LOOPS = {
    "nothing": (lambda model, _: None, []),
    "reads": (lambda model, _: model.weight.grad.norm(), ["uses .grad (norm)"]),
    "clips": (lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.1), ["uses .grad (clamp_)"]),
    "weights": (halve, ["changes weights before step()"]),
    "assigns": (lambda model, _: setattr(model.weight, "grad", torch.ones(2, 2)), ["assigns .grad"]),
    "rate": (lambda _, optimizer: optimizer.param_groups[0].update(lr=0.2), ["changes hyperparameters before step()"]),
}


def train(odd, *, observed):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    observer = LoopObserver(optimizer) if observed else None
    model(torch.ones(1, 2)).sum().backward()
    odd(model, optimizer)
    if observer:
        observer.before_step(is_last=True)
    optimizer.step()
    if observer:
        observer.detach()
    return [p.detach() for p in model.parameters()], observer


@pytest.mark.parametrize("name", LOOPS)
def test_needs_are_noted_and_the_result_is_stock(name):
    odd, needs = LOOPS[name]
    ours, observer = train(odd, observed=True)
    stock, _ = train(odd, observed=False)
    assert all(map(torch.equal, ours, stock))
    assert observer.needs == needs


def test_accumulation_is_noted():
    model = nn.Linear(2, 2)
    observer = LoopObserver(optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    assert observer.needs == ["accumulates"]
    observer.detach()
    assert type(model.weight.grad) is torch.Tensor
    assert torch.equal(model.bias.grad, torch.full((2,), 2.0))
