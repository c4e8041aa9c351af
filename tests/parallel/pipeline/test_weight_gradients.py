"""Weight gradients that wait for W, in one process."""

import torch
from torch import nn
from torch.nn import functional

from gradweave.parallel.pipeline.weight_gradients import StageSplit, WeightGradientLedger


class Twice(nn.Module):
    """One weight in two calls, one used by another operation too, and one without bias."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        x = self.shared(torch.tanh(self.shared(x)))
        return self.frozen(self.other(x)) + self.other.weight.sum()


def run(held, model, x):
    """Forward and X; gives what does W."""
    with held.calls():
        y = model(x)
    y.square().sum().backward()
    return held.build()


def test_x_leaves_weights_alone_and_w_completes_them():
    torch.manual_seed(0)
    model, stock = Twice(), Twice()
    stock.load_state_dict(model.state_dict())
    ledger = WeightGradientLedger(None)
    held = StageSplit(ledger)
    x = torch.randn(3, 4, requires_grad=True)
    own = x.detach().clone().requires_grad_()
    weights = run(held, model, x)
    stock(own).square().sum().backward()
    assert torch.equal(x.grad, own.grad)
    assert model.shared.weight.grad is None
    assert model.shared.bias.grad is None
    assert ledger.most_held > 0
    weights()
    weights()
    assert torch.equal(model.shared.weight.grad, stock.shared.weight.grad)
    assert torch.equal(model.shared.bias.grad, stock.shared.bias.grad)
    torch.testing.assert_close(model.other.weight.grad, stock.other.weight.grad)
    assert model.frozen.weight.grad is None


def test_the_oldest_are_computed_when_too_much_waits():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    ledger = WeightGradientLedger(2 * 3 * 4 * 4)
    held = StageSplit(ledger)
    batches = [torch.randn(3, 4) for _ in range(4)]
    later = [run(held, model, x) for x in batches]
    assert ledger.most_held == 2 * 3 * 4 * 4
    early = model.weight.grad.clone()
    stock = nn.Linear(4, 4)
    stock.load_state_dict(model.state_dict())
    for number, x in enumerate(batches):
        stock(x).square().sum().backward()
        if number == 1:
            assert torch.equal(early, stock.weight.grad)
    for one in later:
        one()
    assert torch.equal(model.weight.grad, stock.weight.grad)


def test_weights_that_are_computed_keep_their_gradients_in_line():
    linear = nn.Linear(4, 4, bias=False)
    held = StageSplit(WeightGradientLedger(None))
    with held.calls():
        y = functional.linear(torch.randn(3, 4), 2 * linear.weight)
    y.sum().backward()
    assert linear.weight.grad is not None
    assert held.tasks == []
