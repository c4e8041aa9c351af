"""A hook that is left behind by copies and pickles of its module."""

import copy
import io

import pytest
import torch
from torch import nn

from gradweave._runtime.module_hook import ModuleHook
from gradweave.errors import GradweaveError


@pytest.fixture
def calls():
    return []


@pytest.fixture
def layer(calls):
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(ModuleHook(lambda module, args: calls.append((module, len(args)))))
    return layer


def test_it_runs_before_the_forward_of_its_module(layer, calls):
    layer(torch.ones(1, 2))
    assert calls == [(layer, 1)]


def test_a_copy_and_a_pickle_are_stock(layer, calls):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for stock in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        stock(torch.ones(1, 2))
    assert calls == []


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripting_is_refused_with_a_remedy(layer):
    with pytest.raises(GradweaveError, match=r"detach\(\) first"):
        torch.jit.script(layer)
