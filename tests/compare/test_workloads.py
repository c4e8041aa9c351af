import sys
import types

import pytest
import torch
from torch import nn

from gradweave.compare.workloads import WORKLOADS, Workload, find_workload
from gradweave.errors import ArgumentError


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "gpt2"])
def test_built_in_workloads_have_a_loss_that_can_be_lowered(name):
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model = workload.make_model()
    x, y = workload.make_data(2, torch.Generator().manual_seed(0))[0]
    loss = workload.loss(model(x), y)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in model.parameters())


@pytest.fixture
def mine(monkeypatch):
    module = types.ModuleType("my_models")
    module.classifier = lambda: nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 5))
    module.workload = lambda: Workload(
        "own", lambda: nn.Linear(2, 2), WORKLOADS["mlp"].make_data, WORKLOADS["mlp"].loss
    )
    module.wrong = lambda: 3
    module.failing = lambda: 1 / 0
    module.other_input = lambda: nn.Linear(7, 7)
    module.number = 3
    monkeypatch.setitem(sys.modules, "my_models", module)


def test_a_users_own_factory(mine):
    workload = find_workload("my_models:classifier")
    x, y = workload.make_data(4, torch.Generator())[0]
    assert x.shape == (4, 3, 224, 224)
    assert y.max() < 5
    assert find_workload("my_models:workload").name == "own"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", "--model='resnet': use one of mlp"),
        ("no_such_package:thing", "cannot be imported"),
        ("my_models:nothing", "my_models has no nothing"),
        ("my_models:wrong", "returned int"),
        ("my_models:failing", "failed when called: ZeroDivisionError"),
        ("my_models:other_input", "does not classify images"),
        ("my_models:number", "something to call"),
    ],
)
def test_mistakes_are_named(mine, name, message):
    with pytest.raises(ArgumentError) as error:
        find_workload(name)
    assert message in str(error.value)
