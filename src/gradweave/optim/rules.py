"""Directions and scales: a gradient less a term of rank one or two per layer, and the length of the step.

With a layer's gradient, or what momentum makes of it, as a matrix ``G``, its input vector ``a`` (with a one for the
bias) and its output vector ``b``, every rule's direction is ``P = G - L Rᵀ`` with one or two columns in L and R::

    joint      G - b (bᵀ G a) aᵀ / (g + |a|² |b|²)              (b bᵀ ⊗ a aᵀ + g I)⁻¹ G, times g
    inputs     G (I - a aᵀ / (g + |a|²))                        G (a aᵀ + g I)⁻¹, times g
    two_sided  (I - b bᵀ / (g + |b|²)) G (I - a aᵀ / (g + |a|²))
    leading    (I - u uᵀ / (1 + e)) G (I - a aᵀ / (g + |a|²))

with damping g, which may be a share of the squares beside it. The first is Eva's as published, the second Eva-f's. The
third is our Eva-s': damping each factor by itself, as K-FAC does, keeps the correction from vanishing. The fourth is
our Eva's: ``u``, of length one, is the direction of outputs in which what the inputs' side leaves is largest, as
approximated by one step of power iteration per training step, up to the previous one.

The scales need ``P·G`` and ``|P|²``, which follow from ``|G|²``, ``G a`` and ``bᵀ G``: ``P`` itself is not computed
before it is applied. Nor are its rows, to each of which our own scale gives the same length: it uses the length that
the inputs' side leaves of a row, which follows from ``G a``, and what the outputs' side takes off. In the third rule
their sum of squares would be the row's if both were orthogonal; in the fourth their difference, if ``u`` were exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

import torch

Formula = Literal["joint", "inputs", "two_sided", "leading"]
JOINT: Literal["joint"] = "joint"
INPUTS: Literal["inputs"] = "inputs"
TWO_SIDED: Literal["two_sided"] = "two_sided"
LEADING: Literal["leading"] = "leading"

LEAST = 0.3
"""The least share of a row's square that the outputs' side is taken to leave."""

Trust = Literal["row", "layer", "normalize", "kl_clip", "gradient_norm"]
ROW: Literal["row"] = "row"
LAYER: Literal["layer"] = "layer"
NORMALIZE: Literal["normalize"] = "normalize"
KL_CLIP: Literal["kl_clip"] = "kl_clip"
GRADIENT_NORM: Literal["gradient_norm"] = "gradient_norm"

LOCAL_TRUSTS: tuple[Trust, ...] = (ROW, LAYER, GRADIENT_NORM)
"""Scales that depend on one layer only; the others are one scale for all layers."""
SIZED_TRUSTS: tuple[Trust, ...] = (ROW, LAYER)
"""Scales that are proportional to the norm that a weight had in its first step."""

Number = float | torch.Tensor


@dataclass(frozen=True)
class UpdateRule:
    """The properties by which our rules and the authors' differ.

    Attributes:
        formula: The direction's formula.
        relative: Whether damping is a share of the vectors' squared size, rather than an absolute number.
        divided: Whether the direction is divided by the damping, as an inverse would be.
        trust: The scale of the direction. ``"layer"`` makes a layer's step ``lr`` times the norm that its weight had
            at first, and ``"row"`` gives each of its rows (an output's weights, with its bias) the same share of that;
            ``"normalize"`` divides by the root of the sum of P·G; ``"kl_clip"`` limits lr² times that sum;
            ``"gradient_norm"`` gives each layer's direction the norm of its own gradient.
        decoupled: Whether weight decay is applied to the weight, rather than added to the direction.
        momentum_first: Whether momentum adds up gradients, and the direction is that of the gradient with a look-ahead
            as Nesterov's; otherwise momentum adds up directions, and is the step itself.
        nesterov_twice: Whether momentum is that of the authors' code of Eva-s, which keeps the result of Nesterov's
            look-ahead.
    """

    formula: Formula
    relative: bool = True
    divided: bool = False
    trust: Trust = ROW
    decoupled: bool = True
    momentum_first: bool = True
    nesterov_twice: bool = False


class _AuthorsRule(TypedDict):
    relative: bool
    decoupled: bool
    momentum_first: bool


AUTHORS: _AuthorsRule = {"relative": False, "decoupled": False, "momentum_first": False}
"""Properties that all of the authors' rules share."""


@dataclass(frozen=True)
class Direction:
    """A layer's direction, as the term that is subtracted from its gradient.

    Attributes:
        left: ``L``: groups, rows, rank.
        right: ``Rᵀ``: groups, rank, columns.
        bias_right: The column of ``Rᵀ`` that belongs to the bias: groups, rank.
        gradient_square: ``|G|²``.
        agreement: ``P·G``.
        square: ``|P|²``.
        factor: Factor of the direction besides its scale.
        row_squares: The square of each row that its scale is computed from, where scales are by rows: groups, rows.
        moves: Which rows are to move at all; None for all of them.
        next_outputs: The next step's output vector, where the rule finds it: groups, rows.
    """

    left: torch.Tensor
    right: torch.Tensor
    bias_right: torch.Tensor | None
    gradient_square: torch.Tensor
    agreement: torch.Tensor
    square: torch.Tensor
    factor: Number
    row_squares: torch.Tensor | None = None
    moves: torch.Tensor | None = None
    next_outputs: torch.Tensor | None = None


@dataclass(frozen=True)
class _InputSide:
    """A gradient and the products with its input vector, of which all formulas are made.

    Attributes:
        gradient: ``G``: groups, rows, columns.
        bias_gradient: The bias' column of ``G``: groups, rows.
        gradient_square: ``|G|²`` with the bias'.
        inputs: ``a`` without the one of a bias: groups, columns.
        inputs_square: ``|a|²`` with it: groups.
        products: ``G a``: groups, rows.
        moves: As in :func:`direction`.
        pointwise: As in :func:`direction`.
    """

    gradient: torch.Tensor
    bias_gradient: torch.Tensor | None
    gradient_square: torch.Tensor
    inputs: torch.Tensor
    inputs_square: torch.Tensor
    products: torch.Tensor
    moves: torch.Tensor | None
    pointwise: bool


def direction(
    rule: UpdateRule,
    damping: Number,
    gradient: torch.Tensor,
    bias_gradient: torch.Tensor | None,
    gradient_square: torch.Tensor,
    inputs: torch.Tensor,
    outputs: torch.Tensor | None,
    *,
    output_damping: Number | None = None,
    moves: torch.Tensor | None = None,
    pointwise: bool = False,
) -> Direction:
    """Return the direction of one layer.

    Args:
        rule: The formula, and the meaning of its damping.
        damping: Of the right side, or of both.
        gradient: ``G``: groups, rows, columns.
        bias_gradient: The bias' column: groups, rows.
        gradient_square: ``|G|²`` with the bias'.
        inputs: ``a`` without the one of a bias: groups, columns.
        outputs: ``b`` or ``u``: groups, rows; None for Eva-f, and where only the inputs' side is known.
        output_damping: Of the left side, if it is not that of the right one.
        moves: Which rows are to move: where momentum comes first, those that have a gradient in this step. Others would
            go on at full length for as long as momentum is not zero.
        pointwise: Whether to compute products as pointwise multiplications and sums, which a compiler fuses into one
            pass with everything else that reads the gradient, rather than by a matrix product.
    """
    products = _times(gradient, inputs, pointwise=pointwise)
    inputs_square = inputs.square().sum(-1)
    if bias_gradient is not None:
        products = products + bias_gradient
        inputs_square = inputs_square + 1
    side = _InputSide(
        gradient, bias_gradient, gradient_square, inputs, inputs_square, products, moves, pointwise=pointwise
    )
    if outputs is not None and rule.formula in (TWO_SIDED, LEADING):
        find = _two_sided if rule.formula == TWO_SIDED else _leading
        return find(rule, side, outputs, damping, damping if output_damping is None else output_damping)
    return _rank_one(rule, side, outputs, damping)


def _times(matrices: torch.Tensor, vectors: torch.Tensor, *, pointwise: bool) -> torch.Tensor:
    """Return ``G v``: groups, rows."""
    return (matrices * vectors[:, None]).sum(-1) if pointwise else torch.bmm(matrices, vectors[..., None])[..., 0]


def _times_from_left(vectors: torch.Tensor, matrices: torch.Tensor, *, pointwise: bool) -> torch.Tensor:
    """Return ``vᵀ G``: groups, columns."""
    return (vectors[..., None] * matrices).sum(1) if pointwise else torch.bmm(vectors[:, None], matrices)[:, 0]


def _rank_one(rule: UpdateRule, side: _InputSide, outputs: torch.Tensor | None, damping: Number) -> Direction:
    """Return the direction of ``"joint"``, or of ``"inputs"``, which the other formulas are without outputs."""
    products, inputs_square = side.products, side.inputs_square
    row_squares = None
    if rule.formula != JOINT:
        on_inputs = _inverse(inputs_square, damping, rule)
        left = products * on_inputs[:, None]
        row_squares = _row_squares(rule, side, _loss_per_square(on_inputs, inputs_square))
    else:
        if outputs is None:
            raise TypeError("this formula needs an output vector")
        size = inputs_square * outputs.square().sum(-1)
        left = outputs * ((outputs * products).sum(-1) * _inverse(size, damping, rule))[:, None]
    removed = (left * products).sum()
    square = side.gradient_square - 2 * removed + (left.square().sum(-1) * inputs_square).sum()
    return Direction(
        left[..., None],
        side.inputs[:, None],
        None if side.bias_gradient is None else torch.ones_like(inputs_square)[:, None],
        side.gradient_square,
        side.gradient_square - removed,
        _positive(square, side.gradient_square),
        1 / damping if rule.divided else 1.0,
        row_squares,
        side.moves,
    )


def _row_squares(rule: UpdateRule, side: _InputSide, loss: torch.Tensor) -> torch.Tensor | None:
    """Return the square of each row of ``G (I - alpha a aᵀ)``, where the scale needs it.

    Args:
        rule: The rule.
        side: The gradient.
        loss: :func:`_loss_per_square` of the inputs.
    """
    if rule.trust != ROW:
        return None
    rows = (side.gradient * side.gradient).sum(-1)
    if side.bias_gradient is not None:
        rows = rows + side.bias_gradient.square()
    return _positive(rows - loss[:, None] * side.products.square(), rows)


def _loss_per_square(alpha: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """Return how much ``|x|²`` loses by ``I - alpha a aᵀ``, per square of ``a·x``.

    Args:
        alpha: The factor.
        square: ``|a|²``.
    """
    return alpha * (2 - alpha * square)


def _two_sided(
    rule: UpdateRule, side: _InputSide, b: torch.Tensor, damping: Number, output_damping: Number
) -> Direction:
    """Return the direction of ``"two_sided"``: each side damped by itself."""
    inputs, products, inputs_square = side.inputs, side.products, side.inputs_square
    outputs_square = b.square().sum(-1)
    on_inputs = _inverse(inputs_square, damping, rule)
    on_outputs = _inverse(outputs_square, output_damping, rule)
    across = (b * products).sum(-1)
    rows = _times_from_left(b, side.gradient, pointwise=side.pointwise)
    left = torch.stack((products * on_inputs[:, None], b), -1)
    both = across * on_inputs * on_outputs
    right = torch.stack((inputs, rows * on_outputs[:, None] - inputs * both[:, None]), 1)
    rows_square = rows.square().sum(-1)
    bias_right = None
    if side.bias_gradient is not None:
        bias_row = (b * side.bias_gradient).sum(-1)
        rows_square = rows_square + bias_row.square()
        bias_right = torch.stack((torch.ones_like(both), bias_row * on_outputs - both), -1)
    products_square = products.square().sum(-1)
    input_loss, output_loss = _loss_per_square(on_inputs, inputs_square), _loss_per_square(on_outputs, outputs_square)
    row_squares = _row_squares(rule, side, input_loss)
    if row_squares is not None:
        taken_off = on_outputs.square() * (rows_square - input_loss * across.square()).clamp_min(0)
        row_squares = row_squares + b.square() * taken_off[:, None]

    def lost(alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """Return how much ``|G|²`` loses in ``(I - beta b bᵀ) G (I - alpha a aᵀ) · G``."""
        return (alpha * products_square + beta * rows_square - (alpha * across) * (beta * across)).sum()

    square = side.gradient_square - lost(input_loss, output_loss)
    return Direction(
        left,
        right,
        bias_right,
        side.gradient_square,
        side.gradient_square - lost(on_inputs, on_outputs),
        _positive(square, side.gradient_square),
        1 / (damping * output_damping) if rule.divided else 1.0,
        row_squares,
        side.moves,
    )


def _leading(
    rule: UpdateRule, side: _InputSide, outputs: torch.Tensor, damping: Number, output_damping: Number
) -> Direction:
    """Return the direction of ``"leading"``, with the output vector after one more step of power iteration.

    The first step only iterates, from a vector of equal elements. Rows' squares would be exact if the direction were: a
    row is taken to be left with :data:`LEAST` of its square, and to be as long as what is taken off it, at least.
    """
    inputs, products, inputs_square = side.inputs, side.products, side.inputs_square
    on_inputs = _inverse(inputs_square, damping, rule)
    is_known = (outputs != 0).any(-1, keepdim=True)
    u = torch.where(is_known, outputs, torch.full_like(outputs, outputs.shape[-1] ** -0.5))
    beta = is_known.to(u.dtype) / (1 + output_damping)
    across = (u * products).sum(-1)
    rows = _times_from_left(u, side.gradient, pointwise=side.pointwise)
    taken = on_inputs * across
    rest = rows - inputs * taken[:, None]  # uᵀ G (I - alpha a aᵀ)
    rest_square = rest.square().sum(-1)
    along_inputs = (rest * inputs).sum(-1)
    found = _times(side.gradient, rest, pointwise=side.pointwise)
    agreement = (rest * rows).sum(-1)
    bias_right = None
    if side.bias_gradient is not None:
        bias_rows = (u * side.bias_gradient).sum(-1)
        bias_rest = bias_rows - taken
        rest_square = rest_square + bias_rest.square()
        along_inputs = along_inputs + bias_rest
        found = found + side.bias_gradient * bias_rest[:, None]
        agreement = agreement + bias_rest * bias_rows
        bias_right = torch.stack((torch.ones_like(taken), bias_rest), -1)
    found = found - products * (on_inputs * along_inputs)[:, None]
    # A product of two gradients; its square would leave the range of float32 long before theirs does.
    found = found * ratio(torch.ones_like(rest_square), rest_square.sqrt())[:, None]
    length = torch.linalg.vector_norm(found, dim=-1, keepdim=True)
    input_loss, output_loss = _loss_per_square(on_inputs, inputs_square), (beta * (2 - beta))[:, 0]
    products_square = products.square().sum(-1)
    square = side.gradient_square - (input_loss * products_square + output_loss * rest_square).sum()
    row_squares = _row_squares(rule, side, input_loss)
    if row_squares is not None:
        off = u.square() * rest_square[:, None]
        left_over = torch.maximum(row_squares - off * output_loss[:, None], LEAST * row_squares)
        row_squares = torch.maximum(left_over, off * beta * beta)
    return Direction(
        torch.stack((products * on_inputs[:, None], u * beta), -1),
        torch.stack((inputs, rest), 1),
        bias_right,
        side.gradient_square,
        side.gradient_square - (on_inputs * products_square + beta[:, 0] * agreement).sum(),
        _positive(square, side.gradient_square),
        1.0,
        row_squares,
        side.moves,
        torch.where(length > 0, found / torch.where(length > 0, length, torch.ones_like(length)), outputs),
    )


def _inverse(size: torch.Tensor, damping: Number, rule: UpdateRule) -> torch.Tensor:
    """Return one over a damped size; 0 where there is no vector, or its square is too small to have an inverse."""
    bottom = size * (1 + damping) if rule.relative else size + damping
    has_inverse = bottom >= 4 * torch.finfo(bottom.dtype).tiny
    inverse = 1 / torch.where(has_inverse, bottom, torch.ones_like(bottom))
    return torch.where(has_inverse, inverse, torch.zeros_like(bottom))


def _positive(square: torch.Tensor, gradient_square: torch.Tensor) -> torch.Tensor:
    """Return a square that rounding has not made negative."""
    return torch.maximum(square, torch.finfo(square.dtype).eps * gradient_square)


def local_scale(trust: Trust, found: Direction, weight_norm: torch.Tensor) -> torch.Tensor:
    """Return the scale of a layer's direction that is the layer's own: one number, or groups by rows by one.

    Args:
        trust: One of :data:`LOCAL_TRUSTS`.
        found: The direction.
        weight_norm: The norm that steps are proportional to.
    """
    if trust == ROW and found.row_squares is not None:
        lengths = found.row_squares.sqrt()
        scales = ratio(weight_norm * lengths.numel() ** -0.5, lengths)
        return (scales if found.moves is None else torch.where(found.moves, scales, torch.zeros_like(scales)))[
            ..., None
        ]
    if trust in SIZED_TRUSTS:
        scale = ratio(weight_norm, found.square.sqrt())
        return scale if found.moves is None else torch.where(found.moves.any(), scale, torch.zeros_like(scale))
    return ratio(found.gradient_square.sqrt(), found.square.sqrt())


def common_scale(trust: Trust, found: list[Direction], rates: list[Number], kl_clip: Number) -> torch.Tensor:
    """Return the one scale of all layers' directions.

    Args:
        trust: ``"normalize"`` or ``"kl_clip"``.
        found: The directions.
        rates: Their learning rates.
        kl_clip: The limit of ``"kl_clip"``.
    """
    agreements = [d.agreement * d.factor for d in found]
    if trust == NORMALIZE:
        total = sum_of(agreements).clamp_min(0)
        return ratio(torch.ones_like(total), total.sqrt())
    changes = [agreement * rate * rate for agreement, rate in zip(agreements, rates, strict=True)]
    total = sum_of(changes).clamp_min(0)
    limited = torch.sqrt(kl_clip / total)
    return torch.where(total > 0, limited, torch.ones_like(total)).clamp_max(1.0)


def sum_of(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors without dimensions."""
    return torch.stack(values).sum()


def ratio(top: torch.Tensor, bottom: torch.Tensor) -> torch.Tensor:
    """Return a quotient, or 0 where it has none."""
    return torch.where(bottom > 0, top / bottom, torch.zeros_like(bottom))
