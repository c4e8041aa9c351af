"""What other techniques see of a fusion: which parameters it updates, and when."""

import pytest
from torch import nn, optim

from gradweave import fuse
from gradweave._runtime.fused_updates import is_deferred_in_graph, updated_in_backward, updated_in_forward


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def ids(module):
    return set(map(id, module.parameters()))


def test_parameters_are_those_of_the_fusions_optimizer_by_mode(model):
    with (
        fuse(model, optim.SGD(model[0].parameters(), lr=0.1), "forward") as first,
        fuse(model, optim.SGD(model[1].parameters(), lr=0.1), "backward") as second,
    ):
        assert updated_in_forward(model) == ids(model[0])
        assert updated_in_forward(model[1]) == set()
        assert updated_in_backward(model) == dict.fromkeys(ids(model[1]), second)
        assert not is_deferred_in_graph(model)
        with first.in_graph():
            assert is_deferred_in_graph(model)
    assert updated_in_forward(model) == set()
    assert updated_in_backward(model) == {}


def test_auto_promises_neither(model):
    with fuse(model, optim.SGD(model.parameters(), lr=0.1)):
        assert updated_in_forward(model) == set()
        assert updated_in_backward(model) == {}
