"""Directions and their norms against explicit inverses and projections."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradweave.optim.rules import (
    INPUTS,
    JOINT,
    KL_CLIP,
    LAYER,
    LEADING,
    LEAST,
    NORMALIZE,
    ROW,
    TWO_SIDED,
    UpdateRule,
    common_scale,
    direction,
    local_scale,
)
from reference import eva as slow

SIZES = st.integers(1, 6)


DAMPINGS = st.floats(1e-3, 10)


def applied(found, gradient, bias_gradient):
    """P in full, with the bias' column."""
    P = gradient - found.left @ found.right
    if bias_gradient is None:
        return P
    column = bias_gradient - (found.left * found.bias_right[:, None]).sum(-1)
    return torch.cat([P, column[..., None]], -1)


def make(seed, groups, rows, columns, with_bias):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    bias = draw(groups, rows) if with_bias else None
    return draw(groups, rows, columns), bias, draw(groups, columns), draw(groups, rows)


@given(st.integers(0, 999), st.integers(1, 3), SIZES, SIZES, st.booleans(), DAMPINGS, st.booleans(),
       st.sampled_from([JOINT, INPUTS, TWO_SIDED]))  # fmt: skip
def test_a_direction_is_the_explicit_inverse(seed, groups, rows, columns, with_bias, damping, relative, formula):
    G, g, a, b = make(seed, groups, rows, columns, with_bias)
    square = G.square().sum() + (0 if g is None else g.square().sum())
    found = direction(UpdateRule(formula, relative=relative, divided=True), damping, G, g, square, a, b)
    P = applied(found, G, g)
    for group in range(groups):
        whole = slow.joined(G[group], None if g is None else g[group])
        vector = torch.cat([a[group], torch.ones(1, dtype=a.dtype)]) if with_bias else a[group]
        out = b[group]
        on_a = damping * (vector @ vector) if relative else damping
        on_b = damping * (out @ out) if relative else damping
        if formula == JOINT:
            gamma = damping * (vector @ vector) * (out @ out) if relative else damping
            expected = slow.explicit_joint(whole, vector, out, gamma) * gamma
        elif formula == INPUTS:
            expected = slow.explicit_inputs(whole, vector, on_a) * on_a
        else:
            expected = slow.explicit_two_sided(whole, vector, out, on_a, on_b) * on_a * on_b
        assert torch.allclose(P[group], expected, rtol=1e-5, atol=1e-7)
    whole = G if g is None else torch.cat([G, g[..., None]], -1)
    assert torch.allclose(found.agreement, (P * whole).sum(), rtol=1e-5, atol=1e-9)
    assert torch.allclose(found.square, P.square().sum(), rtol=1e-5, atol=1e-9)
    assert float(found.factor) == pytest.approx(1 / damping ** (2 if formula == TWO_SIDED else 1))


@given(st.integers(0, 999), st.integers(1, 3), SIZES, SIZES, st.booleans(), DAMPINGS, st.booleans())
def test_rows_have_one_length(seed, groups, rows, columns, with_bias, damping, two_sided):
    """Exactly so where only the inputs' side is corrected; with both, no row is more than 1.42 times as long."""
    G, g, a, b = make(seed, groups, rows, columns, with_bias)
    square = G.square().sum() + (0 if g is None else g.square().sum())
    found = direction(
        UpdateRule(TWO_SIDED if two_sided else INPUTS), damping, G, g, square, a, b if two_sided else None
    )
    size = torch.tensor(3.0, dtype=torch.float64)
    lengths = torch.linalg.vector_norm(local_scale(ROW, found, size) * applied(found, G, g), dim=-1)
    wanted = 3.0 / (groups * rows) ** 0.5
    assert (lengths <= wanted * (2**0.5 + 1e-6)).all()
    if not two_sided:
        torch.testing.assert_close(lengths, torch.full_like(lengths, wanted), rtol=1e-4, atol=0)


def test_a_row_without_a_gradient_stays():
    G = torch.tensor([[[1.0, 2.0], [0.0, 0.0]]])
    found = direction(UpdateRule(INPUTS), 0.1, G, None, G.square().sum(), torch.ones(1, 2), None)
    assert local_scale(ROW, found, torch.tensor(1.0)).flatten()[1] == 0


@pytest.mark.parametrize("formula", [JOINT, INPUTS, TWO_SIDED])
@pytest.mark.parametrize("relative", [True, False])
def test_a_vector_of_zeros_leaves_the_gradient(formula, relative):
    G, _, a, b = make(0, 2, 3, 4, False)
    rule = UpdateRule(formula, relative=relative)
    found = direction(rule, 0.1, G, None, G.square().sum(), a * 0, b * 0)
    assert torch.equal(applied(found, G, None), G)
    assert torch.equal(found.square, G.square().sum())


def test_common_scales():
    G, _, a, b = make(0, 1, 3, 4, False)
    rule = UpdateRule(JOINT, relative=False, divided=True)
    found = [direction(rule, 0.1, k * G, None, (k * G).square().sum(), a, b) for k in (1, 2)]
    gradients = [G[0], 2 * G[0]]
    P = [slow.explicit_joint(g, a[0], b[0], 0.1) for g in gradients]
    assert float(common_scale(KL_CLIP, found, [0.5, 0.5], 1e-3)) == pytest.approx(slow.kl_clip(P, gradients, 0.5, 1e-3))
    assert float(common_scale(KL_CLIP, found, [1e-9, 1e-9], 1e-3)) == 1.0
    assert float(common_scale(NORMALIZE, found, [], 1)) == pytest.approx(slow.normalizer(P, gradients))


def test_scales_of_nothing_are_finite():
    zero = torch.zeros(1, 2, 3)
    found = [direction(UpdateRule(INPUTS), 0.1, zero, None, zero.sum(), zero[:, 0], None)]
    for trust in (KL_CLIP, NORMALIZE):
        assert torch.isfinite(common_scale(trust, found, [0.1], 1e-3))


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
