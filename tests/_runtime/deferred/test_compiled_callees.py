"""Compiled functions that are given parameters of a layer inside their module find them updated."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from _runtime.deferred.comparison import pending, train
from fusion.loops import assert_same


def _linear(x, weight, bias):
    return F.linear(x, weight, bias)


@pytest.mark.parametrize("where", ["in forward", "in a method, by a function"])
def test_a_scripted_function_that_is_given_parameters_of_a_layer(where):
    scripted = torch.jit.script(_linear)

    def project(x, layer):
        return scripted(x, layer.weight, layer.bias)

    class InForward(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.inner, self.head = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 3)

        def forward(self, x):
            layer = self.inner[0]
            return self.head(torch.tanh(scripted(torch.tanh(self.first(x)), layer.weight, layer.bias)))

    class InMethod(InForward):
        def forward(self, x):
            return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))

        def middle(self, x):
            return project(x, self.inner[0])

    cls = InForward if where == "in forward" else InMethod
    (expected, _), (trained, waiting) = (
        train(None, model=cls()),
        train("forward", lambda i, model, *_: pending(model), model=cls()),
    )
    assert_same(trained, expected)
    assert all(waiting[1:])
