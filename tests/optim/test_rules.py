"""Directions and their norms against explicit inverses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradweave.optim.rules import (
    INPUTS,
    JOINT,
    KL_CLIP,
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
