"""Records of layers on their own, for the tests of statistics."""

import torch
from torch import nn

from gradweave.optim.statistics.coverage import Capture
from gradweave.optim.statistics.hooks import StatisticsOptions

ALL = StatisticsOptions(outputs=True)


def collect(model, options=ALL):
    capture = Capture(model, options)
    for layer in capture.layers:
        layer.tap.record = layer.tap.new_record(layer.weight)
    return capture


def records(capture):
    return [layer.tap.record.clone() for layer in capture.layers]


def parts(layer):
    """Sums of inputs, number of places, sums of outputs, by group."""
    layout, record = layer.tap.layout, layer.tap.record
    size = layout.groups * layout.inputs
    return record[:size].view(layout.groups, -1), record[size], record[size + 1 :].view(layout.groups, -1)


def single(module, x, options=ALL):
    """One layer on its own: what was caught, its output and that output's gradient."""
    capture = collect(nn.Sequential(module), options)
    y = module(x)
    y.retain_grad()
    (y * torch.arange(y.numel()).view(y.shape).to(y).cos()).sum().backward()
    capture.remove()
    return capture.layers[0], y.grad
