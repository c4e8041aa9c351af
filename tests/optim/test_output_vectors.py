"""What Eva's output vectors are made of: the bias' gradient where that is the whole batch's, else some samples."""

import pytest
import torch
from torch import nn

from gradweave.optim import Eva


def direction(vector):
    return vector / torch.linalg.vector_norm(vector)


def take_step(model, optimizer, x):
    """The gradients of all outputs of the model's first layer."""
    seen = []
    handle = model[0].register_forward_hook(lambda _, __, y: y.register_hook(seen.append) and None)
    model(x).square().sum().backward()
    handle.remove()
    optimizer.step()
    optimizer.zero_grad()
    return seen[0]


def own_vector(optimizer, layer):
    return optimizer.state[layer.weight]["output_vector"].flatten()


def test_of_the_whole_batch_where_there_is_a_bias():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = Eva(model, lr=0.01)
    outputs = take_step(model, optimizer, torch.randn(40, 5))
    torch.testing.assert_close(own_vector(optimizer, model[0]), direction(outputs.sum(0)), rtol=1e-4, atol=1e-5)


def test_of_the_whole_batch_and_all_places_of_a_convolution():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(40, 2, 6, 6)
    model(x)
    optimizer = Eva(model, lr=0.01)
    outputs = take_step(model, optimizer, x).sum((0, 2, 3))
    expected = torch.cat([direction(part) for part in outputs.split(2)])
    torch.testing.assert_close(own_vector(optimizer, model[0]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_there_is_none_in_front_of_a_norm(bias):
    """Where the gradients of all samples sum to zero; a checkpoint that has one is no obstacle."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, bias=bias), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(8, 2, 6, 6)
    model(x)
    optimizer = Eva(model, lr=0.01)
    outputs = take_step(model, optimizer, x)
    assert outputs.sum((0, 2, 3)).abs().max() < 1e-4 * outputs.abs().sum()
    assert "output_vector" not in optimizer.state[model[0].weight]
    assert "output_vector" in optimizer.state[model[3].weight]
    earlier = Eva(model, lr=0.01, samples=4)
    take_step(model, earlier, x)
    optimizer.load_state_dict(earlier.state_dict())
    assert "output_vector" not in optimizer.state[model[0].weight]
    take_step(model, optimizer, x)


def with_bias_apart(model):
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return Eva(model, [{"params": rest}, {"params": biases, "weight_decay": 0.0}], lr=0.01)


@pytest.mark.parametrize(
    ("layers", "make", "count"),
    [
        ([nn.Linear(5, 4, bias=False), nn.Tanh()], lambda model: Eva(model, lr=0.01), 16),
        ([nn.Linear(5, 4), nn.BatchNorm1d(4)], lambda model: Eva(model, lr=0.01, samples=16), 16),
        ([nn.Linear(5, 4), nn.Tanh()], with_bias_apart, 16),
        ([nn.Linear(5, 4), nn.Tanh()], lambda model: Eva(model, lr=0.01, samples=7), 7),
    ],
)
def test_of_some_samples_where_there_is_no_bias_or_the_user_says_so(layers, make, count):
    model = nn.Sequential(*layers, nn.Linear(4, 3))
    optimizer = make(model)
    outputs = take_step(model, optimizer, torch.randn(40, 5))
    torch.testing.assert_close(own_vector(optimizer, model[0]), direction(outputs[:count].sum(0)), rtol=1e-4, atol=1e-5)
