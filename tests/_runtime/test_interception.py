"""Modes that split the calls of layers, and parameters whose update is pending."""

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gradweave._runtime.deferred.pending_parameter import make_pending, restore
from gradweave._runtime.interception import (
    WeightGradientSplitter,
    apply_pending_updates,
    weight_gradients_are_split,
)
from gradweave._runtime.split_calls.queued_calls import QueuedCalls


def test_reordering_splits_weight_gradients():
    assert issubclass(QueuedCalls, WeightGradientSplitter)


class Splitter(WeightGradientSplitter):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Other(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_only_a_splitter_that_is_entered_counts():
    mode = Splitter()
    assert not weight_gradients_are_split()
    with mode, torch.device("cpu"):
        assert weight_gradients_are_split()
    with Other():
        assert not weight_gradients_are_split()


def test_pending_updates_are_applied_and_all_else_is_ignored():
    p = nn.Parameter(torch.zeros(2))
    updated = []

    def resolve(param):
        restore(param)
        updated.append(param)

    make_pending(p, resolve, None)
    apply_pending_updates(None, 3, torch.zeros(1), nn.Parameter(torch.zeros(1)), p)
    assert updated == [p]
    assert type(p) is nn.Parameter
