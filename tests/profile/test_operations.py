from contextlib import contextmanager

import pytest
import torch
from torch import nn

from gradweave._compat.dispatch import EveryResult
from gradweave.errors import GradweaveError
from gradweave.profile.operations import differentiate_eagerly
from gradweave.profile.recorded import record_operations
from gradweave.schedule.tasks import Kind
from step_graph.models import Called, mlp, square


def test_what_is_done_again_has_the_same_result():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(3, 8)
    params = list(model.parameters())
    _, expected = differentiate_eagerly(model, square, params, (x,))
    operations = record_operations(model, square, params, (x,))
    products = {}

    @contextmanager
    def note(kind, layer):
        with EveryResult(lambda function, _, __, result: products.update({(kind, layer, str(function)): result})):
            yield

    operations.run(note)
    for layer, weight in enumerate((params[0], params[2])):
        assert torch.equal(products[Kind.W, layer, "aten.mm.default"], expected[weight])


@pytest.mark.parametrize("trained", [True, False])
def test_a_loss_without_parameters(trained):
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    with pytest.raises(GradweaveError, match="no parameter"):
        differentiate_eagerly(model.requires_grad_(trained), square, list(other.parameters()), (torch.randn(3, 8),))


def test_autocast_around_it_casts_once():
    """Also what is kept out of it."""
    model, x = mlp(), torch.randn(3, 8)
    inside, outside = Called(), Called()

    def partly(model, x):
        with torch.autocast("cpu", enabled=False):
            x = model[:-1](x)
        return square(model[-1], x)

    with torch.autocast("cpu", torch.bfloat16):
        operations = record_operations(model, partly, list(model.parameters()), (x,))
        operations.run(inside)
    operations.run(outside)
    assert inside.of == outside.of
