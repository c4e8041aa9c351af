"""K-FAC, FOOF and Shampoo against their formulas, and how often they invert."""

import copy

import pytest
import torch
from torch import nn

from gradweave.errors import ArgumentError
from gradweave.optim import FOOF, KFAC, Shampoo
from optim.models import images, loss_of, make_conv, make_mlp, rows, train, weights
from reference import eva as slow
from reference.second_order import foof_direction, kfac_direction, shampoo_direction

DENSE = [KFAC, FOOF, Shampoo]
every = pytest.mark.parametrize("cls", DENSE)


def one_step(layer, x, optimizer):
    """Rows of inputs and outputs' gradients, the gradient, and by how much a step without momentum moved it."""
    y = layer(x)
    y.retain_grad()
    (y - 1).square().mean().backward()
    if isinstance(layer, nn.Conv2d):
        inputs, outputs = slow.conv_rows(x, layer), slow.output_rows(y.grad)
    else:
        inputs, outputs = slow.linear_rows(x), slow.linear_rows(y.grad)
    inputs, outputs = inputs.reshape(-1, inputs.shape[-1]), outputs.reshape(-1, outputs.shape[-1])
    if layer.bias is not None:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    G = slow.joined(layer.weight.grad, None if layer.bias is None else layer.bias.grad)
    before = slow.joined(layer.weight, layer.bias).detach().clone()
    optimizer.step()
    moved = (before - slow.joined(layer.weight, layer.bias).detach()) / optimizer.param_groups[0]["lr"]
    return inputs, outputs, G, moved


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (7, 4)),
    "sequence": (lambda: nn.Linear(4, 3, bias=False), (5, 2, 4)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (4, 2, 5, 5)),
}


@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.parametrize("clip", [1e9, 1e-6])
def test_kfac_and_foof_are_their_formulas(kind, clip):
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    for cls in (KFAC, FOOF):
        layer = make().double()
        optimizer = cls(nn.Sequential(layer), lr=0.01, damping=0.1, kl_clip=clip)
        inputs, outputs, G, moved = one_step(layer, x, optimizer)
        expected = kfac_direction(G, inputs, outputs, len(x), 0.1) if cls is KFAC else foof_direction(G, inputs, 0.1)
        expected = expected * slow.kl_clip([expected], [G], 0.01, clip)
        assert torch.allclose(moved, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("shape", [(4, 3), (3, 2, 2, 2)])
def test_shampoo_is_its_formula(shape):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    model = nn.ParameterList([weight])
    optimizer = Shampoo(model, lr=0.1, momentum=0.0, refresh=1, damping=0.01)
    history = []
    for _ in range(3):
        weight.grad = torch.randn(shape, dtype=torch.float64)
        history.append(weight.grad)
        before = weight.detach().clone()
        optimizer.step()
        assert torch.allclose((before - weight.detach()) / 0.1, shampoo_direction(history, 0.01), rtol=1e-6)


@every
def test_losses_fall_and_steps_between_refreshes_keep_the_inverse(cls):
    model = make_conv()
    losses = train(model, cls(model, lr=0.02, refresh=3), [images(1)[0]] * 25)
    assert losses[-1] < 0.9 * losses[0]
    results = []
    for refresh in (1, 4):
        model = make_mlp()
        optimizer = cls(model, refresh=refresh)
        train(model, optimizer, rows(1))
        key = "root_0" if cls is Shampoo else "inputs_inverse"
        first = optimizer.state[model[0].weight][key].clone()
        train(model, optimizer, rows(2))
        results.append(torch.equal(first, optimizer.state[model[0].weight][key]))
    assert results == [False, True]


@every
def test_resuming_and_bad_gradients(cls):
    model = make_mlp()
    optimizer = cls(model, refresh=2)
    train(model, optimizer, rows(4))
    other = copy.deepcopy(model)
    resumed = cls(other, refresh=2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, rows(3))
    train(other, resumed, rows(3))
    assert torch.equal(weights(model), weights(other))
    loss_of(model, rows(1)[0]).backward()
    model[0].weight.grad[0, 0] = float("nan")
    before = weights(model)
    optimizer.step()
    assert torch.equal(before, weights(model))


@every
def test_bad_arguments(cls):
    with pytest.raises(ArgumentError, match="refresh=0"):
        cls(make_mlp(), refresh=0)
    with pytest.raises(ArgumentError, match="damping=0"):
        cls(make_mlp(), damping=0.0)
    with pytest.raises(ArgumentError, match="has no layer for this method"):
        cls(nn.LayerNorm(3))
