"""Eva's output vectors: the direction of outputs in which steps would be largest, found by power iteration."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradweave.optim import Eva
from gradweave.optim.rules import LAYER, LEADING, LEAST, ROW, UpdateRule, direction, local_scale

SIZES = st.integers(1, 6)


def draw(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def full(found, gradient, bias):
    P = gradient - found.left @ found.right
    column = bias - (found.left * found.bias_right[:, None]).sum(-1)
    return torch.cat([P, column[..., None]], -1)


@given(st.integers(0, 999), st.integers(1, 3), SIZES, SIZES, st.floats(1e-3, 10), st.floats(1e-3, 10), st.booleans())
def test_a_direction_is_what_the_explicit_projections_leave(seed, groups, rows, columns, damping, other, pointwise):
    G, g, a, u = draw(seed, (groups, rows, columns), (groups, rows), (groups, columns), (groups, rows))
    u = u / torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    square = G.square().sum() + g.square().sum()
    found = direction(UpdateRule(LEADING), damping, G, g, square, a, u, output_damping=other, pointwise=pointwise)
    P = full(found, G, g)
    for group in range(groups):
        whole = torch.cat([G[group], g[group, :, None]], 1)
        vector = torch.cat([a[group], torch.ones(1, dtype=a.dtype)])
        rest = whole - torch.outer(whole @ vector, vector) / ((1 + damping) * vector @ vector)
        expected = rest - torch.outer(u[group], u[group] @ rest) / (1 + other)
        torch.testing.assert_close(P[group], expected, rtol=1e-6, atol=1e-8)
        following = rest @ (u[group] @ rest)
        following = following / torch.linalg.vector_norm(following)
        torch.testing.assert_close(found.next_outputs[group], following, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.square, P.square().sum(), rtol=1e-6, atol=1e-8)
    whole = torch.cat([G, g[..., None]], -1)
    torch.testing.assert_close(found.agreement, (P * whole).sum(), rtol=1e-6, atol=1e-8)


@given(st.integers(0, 999), st.integers(2, 8), st.integers(1, 8))
def test_lengths_of_rows(seed, rows, columns):
    """Of one length, shorter where little is left of a row, and never more than a few times as long."""
    G, a, u = draw(seed, (1, rows, columns), (1, columns), (1, rows))
    u = u / torch.linalg.vector_norm(u)
    found = direction(UpdateRule(LEADING), 0.1, G, None, G.square().sum(), a, u, output_damping=0.1)
    size = torch.tensor(3.0, dtype=torch.float64)
    P = G - found.left @ found.right
    lengths = torch.linalg.vector_norm(local_scale(ROW, found, size) * P, dim=-1)
    assert (lengths <= 3.0 * rows**-0.5 * (LEAST**-0.5 + 1)).all()


def test_rows_have_one_length_where_the_direction_is_exact():
    G, a = draw(3, (1, 30, 20), (1, 20))
    left, sizes, _ = torch.linalg.svd(G - (G @ a[..., None]) * a[:, None] / (1.1 * a.square().sum()))
    assert sizes[0, 0] > sizes[0, 1]
    found = direction(UpdateRule(LEADING), 0.1, G, None, G.square().sum(), a, left[:, :, 0], output_damping=0.1)
    lengths = torch.linalg.vector_norm(
        local_scale(ROW, found, torch.tensor(30.0**0.5, dtype=torch.float64)) * (G - found.left @ found.right), dim=-1
    )
    is_one = (lengths - 1).abs() < 1e-6
    assert is_one.sum() > 25
    assert (lengths[~is_one] < 1).all()
    assert local_scale(LAYER, found, torch.tensor(1.0, dtype=torch.float64)) > 0
    torch.testing.assert_close(found.next_outputs.abs(), left[:, :, 0].abs(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("bias", [True, False])
def test_the_leading_direction_is_found_in_front_of_a_norm_too(bias):
    """Where the mean of outputs' gradients is zero, and no vector of the published kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 16, 3, bias=bias), nn.BatchNorm2d(16), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(8, 2, 6, 6)
    model(x)
    optimizer = Eva(model, lr=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    weight = model[0].weight
    a = optimizer.state[weight]["input_vector"][0]
    X = weight.grad.flatten(1)
    if bias:
        a, X = torch.cat((a, torch.ones(1))), torch.cat((X, model[0].bias.grad[:, None]), 1)
    rest = X - torch.outer(X @ a, a) / (1.01 * a @ a)
    leading = torch.linalg.svd(rest).U[:, 0]
    found = optimizer.state[weight]["output_vector"][0]
    assert float((found * leading).sum().abs()) > 0.999
    assert float(torch.linalg.vector_norm(found)) == pytest.approx(1, abs=1e-5)


def test_the_first_step_is_that_without_output_vectors():
    G, a = draw(0, (1, 5, 4), (1, 4))
    found = direction(UpdateRule(LEADING), 0.1, G, None, G.square().sum(), a, torch.zeros(1, 5, dtype=torch.float64))
    alone = direction(UpdateRule(LEADING), 0.1, G, None, G.square().sum(), a, None)
    torch.testing.assert_close(found.left @ found.right, alone.left @ alone.right)
    torch.testing.assert_close(found.row_squares, alone.row_squares)
    assert alone.next_outputs is None
    assert float(found.next_outputs.square().sum()) == pytest.approx(1)


@pytest.mark.parametrize("u", [[0.6, 0.8], [0.0, 0.0]])
def test_a_gradient_of_zeros_leaves_the_vector(u):
    u = torch.tensor([u])
    zero = torch.zeros(1, 2, 3)
    found = direction(UpdateRule(LEADING), 0.1, zero, None, zero.sum(), torch.ones(1, 3), u)
    assert torch.equal(found.next_outputs, u)


@pytest.mark.parametrize("factor", [2.0**-45, 2.0**45])
def test_small_and_large_gradients_have_the_same_leading_direction(factor):
    G, a, u = (x.float() for x in draw(1, (1, 6, 5), (1, 5), (1, 6)))
    u = u / torch.linalg.vector_norm(u)
    found, other = (direction(UpdateRule(LEADING), 0.1, x, None, x.square().sum(), a, u) for x in (G, G * factor))
    torch.testing.assert_close(other.next_outputs, found.next_outputs)


def test_layers_of_few_outputs_and_transposed_ones_have_none():
    layers = [nn.Conv2d(8, 32, 3, groups=4), nn.ConvTranspose2d(8, 32, 2), nn.Conv2d(8, 16, 1), nn.Linear(5, 15)]
    optimizer = Eva(nn.Sequential(*layers))
    assert ["output_vector" in optimizer.state[layer.weight] for layer in layers] == [False, False, True, False]


def test_a_step_that_is_left_out_leaves_the_vector():
    torch.manual_seed(0)
    model = nn.Linear(4, 16)
    optimizer = Eva(model)
    for factor in (1.0, float("nan")):
        before = optimizer.state[model.weight]["output_vector"].clone()
        (model(torch.randn(5, 4)).square().sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(before.square().sum()) == pytest.approx(1, abs=1e-5)
    assert torch.equal(optimizer.state[model.weight]["output_vector"], before)
