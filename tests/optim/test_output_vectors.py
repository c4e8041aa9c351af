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


def with_bias_apart(model):
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    rest = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return Eva(model, [{"params": rest}, {"params": biases, "weight_decay": 0.0}], lr=0.01)


@pytest.mark.parametrize(
    ("layers", "make", "count"),
    [
        ([nn.Linear(5, 4, bias=False), nn.Tanh()], lambda model: Eva(model, lr=0.01), 16),
        ([nn.Linear(5, 4), nn.BatchNorm1d(4)], lambda model: Eva(model, lr=0.01), 16),
        ([nn.Linear(5, 4), nn.Tanh()], with_bias_apart, 16),
        ([nn.Linear(5, 4), nn.Tanh()], lambda model: Eva(model, lr=0.01, samples=7), 7),
    ],
)
def test_of_some_samples_where_there_is_none_or_a_norm_or_the_user_says_so(layers, make, count):
    model = nn.Sequential(*layers, nn.Linear(4, 3))
    optimizer = make(model)
    outputs = take_step(model, optimizer, torch.randn(40, 5))
    torch.testing.assert_close(own_vector(optimizer, model[0]), direction(outputs[:count].sum(0)), rtol=1e-4, atol=1e-5)
