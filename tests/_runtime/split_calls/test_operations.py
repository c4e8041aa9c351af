"""Linear and convolution whose backward leaves the weight gradient as a task: the stock bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from _runtime.split_calls.against_stock import check, precisions, ways, weights_of
from gradweave._runtime.split_calls.queue import InlineLane, WeightGradientQueue
from gradweave._runtime.split_calls.queued_calls import QueuedCalls


@ways
@precisions
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 4, 8), (0, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape, bias, autocast, delayed, budget):
    model = nn.Sequential(nn.Linear(8, 16, bias=bias), nn.GELU(), nn.Linear(16, 4, bias=bias))
    queue = check(model, torch.randn(shape), autocast=autocast, delayed=delayed, budget=budget)
    if budget is not None:
        assert queue.peak_bytes <= budget


CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 9, 9)),
    "2d, no bias": (lambda: nn.Conv2d(4, 6, 1, bias=False), (2, 4, 5, 5)),
    "2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, dilation=2), (2, 4, 9, 9)),
    "2d, groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, padding="valid"), (2, 4, 9, 9)),
    "2d, same": (lambda: nn.Conv2d(4, 8, 3, padding="same"), (2, 4, 9, 9)),
    "2d, reflect": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 9)),
    "3d": (lambda: nn.Conv3d(2, 3, (1, 3, 2)), (2, 2, 4, 5, 5)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 9)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), (2, 4, 9, 9)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 2, dilation=2), (1, 2, 4, 4, 4)),
    "empty": (lambda: nn.Conv2d(4, 6, 3), (0, 4, 9, 9)),
    "unbatched": (lambda: nn.Conv2d(4, 6, 3), (4, 9, 9)),
}


@precisions
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(("delayed", "budget"), [(True, None), (True, 0), (False, None)])
def test_convolutions(name, autocast, delayed, budget):
    make, shape = CONVOLUTIONS[name]
    model = nn.Sequential(make(), nn.ReLU())
    check(model, torch.randn(shape), autocast=autocast, delayed=delayed, budget=budget)


@precisions
def test_channels_last(autocast):
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8))
    model = model.to(memory_format=torch.channels_last)
    check(model, torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last), autocast=autocast)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 5), st.booleans(), st.booleans(), st.integers(0, 400))
def test_linear_of_any_layout(inputs, outputs, rows, transposed, bias, budget):
    model = nn.Linear(inputs, outputs, bias=bias)
    x = torch.randn(inputs, rows).t() if transposed else torch.randn(rows, inputs)
    check(model, x, budget=budget)
    check(model, torch.randn(2, inputs, rows).transpose(1, 2) if transposed else torch.randn(2, rows, inputs))


@precisions
def test_second_derivatives(autocast):
    def both(split):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Conv1d(3, 2, 2))
        x = torch.randn(2, 3, 4, requires_grad=True)
        queue = WeightGradientQueue(InlineLane())
        with (
            QueuedCalls(queue, weights_of(model)) if split else torch.enable_grad(),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            loss = model(x).float().square().sum()
        first = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), [x, *model.parameters()])]

    torch.manual_seed(2)
    made = both(True)
    torch.manual_seed(2)
    tolerance = {"rtol": 0.05, "atol": 0.05} if autocast else {}
    for one, other in zip(made, both(False), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_a_weight_changed_before_backward_is_an_error():
    model = nn.Linear(4, 4)
    with QueuedCalls(WeightGradientQueue(InlineLane())):
        loss = model(torch.randn(2, 4, requires_grad=True)).sum()
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4), (2, 2, 3, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_results_changed_in_place(shape, bias):
    check(nn.Sequential(nn.Linear(4, 5, bias=bias), nn.ReLU(inplace=True), nn.Linear(5, 2)), torch.randn(shape))
    check(nn.Sequential(nn.Conv1d(4, 5, 1, bias=bias), nn.ReLU(inplace=True)), torch.randn(2, 4, 3))


class Binary(nn.Linear):
    """Puts another tensor in the place of its weight in every forward."""

    def forward(self, x):
        if not hasattr(self, "original"):
            self.original = self.weight.data.clone()
        self.weight.data = self.original.sign()
        return F.linear(x, self.weight, self.bias)


def test_weights_that_are_replaced_in_forward():
    check(nn.Sequential(Binary(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3, 4))


def test_gradients_are_handed_over_and_not_copied():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def copies(split):
        model.zero_grad()
        with QueuedCalls(WeightGradientQueue(InlineLane()), weights_of(model)) if split else torch.enable_grad():
            loss = model(torch.randn(2, 16)).sum()
        with torch.profiler.profile() as profile:
            loss.backward()
        return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")

    assert copies(True) <= copies(False)
