"""What the family has in common: a gradient less a term of rank one or two per layer, and a scale.

With a layer's gradient, or what momentum makes of it, as a matrix ``G``, its input vector ``a`` (with a one for the
bias) and its output vector ``b``, every rule's direction is ``P = G - L Rᵀ`` with one or two columns in L and R::

    joint      G - b (bᵀ G a) aᵀ / (g + |a|² |b|²)              (b bᵀ ⊗ a aᵀ + g I)⁻¹ G, times g
    inputs     G (I - a aᵀ / (g + |a|²))                        G (a aᵀ + g I)⁻¹, times g
    two_sided  (I - b bᵀ / (g + |b|²)) G (I - a aᵀ / (g + |a|²))
    leading    (I - u uᵀ / (1 + e)) G (I - a aᵀ / (g + |a|²))

with damping g, which may be a share of the squares beside it. The first is Eva's as published, the
second Eva-f's. The third is our Eva-s': damping each factor by itself, as K-FAC does, keeps the
correction from vanishing. The fourth is our Eva's: ``u``, of length one, is the direction of outputs in which what
the inputs' side leaves is largest, as far as one power iteration in each step has come by the step before.

``P·G`` and ``|P|²``, which the scales need, follow from ``|G|²``, ``G a`` and ``bᵀ G``: ``P`` itself is never made
before it is applied. Nor are its rows, which our own scale gives one length each: it goes by the length that the
inputs' side leaves them, which follows from ``G a``, and by what the outputs' side takes off. In the third rule
their sum of squares is the row's, were they orthogonal; in the fourth their difference, were ``u`` exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

JOINT, INPUTS, TWO_SIDED, LEADING = "joint", "inputs", "two_sided", "leading"
LEAST = 0.3
"""The least share of a row's square that the outputs' side is taken to leave."""

ROW, LAYER, NORMALIZE, KL_CLIP, RESCALE, GRADIENT_NORM, NONE = (
    "row", "layer", "normalize", "kl_clip", "rescale", "gradient_norm", "none",
)  # fmt: skip
LOCAL_TRUSTS = (ROW, LAYER, GRADIENT_NORM, NONE)
"""Those whose scale is each layer's own."""
SIZED_TRUSTS = (ROW, LAYER)
"""Those that measure steps by the norm that a weight had at first."""

Number = float | torch.Tensor


@dataclass(frozen=True)
class Manner:
    """What distinguishes the authors' rules from each other and from ours.

    Attributes:
        formula: The direction's.
        relative: Whether damping is a share of the vectors' squared size, or a number as it is.
        divided: Whether the direction is divided by the damping, as an inverse would be.
        trust: What the direction's scale is: ``"layer"`` makes a layer's step ``lr`` times the norm
            that its weight had at first, and ``"row"`` gives each of its rows (an output's weights, with its bias)
            the same share of that; ``"normalize"`` divides by the root of the sum of P·G; ``"kl_clip"``
            limits lr² times that sum; ``"rescale"`` gives all directions together the gradients'
            norm, ``"gradient_norm"`` each its own gradient's; ``"none"`` leaves them.
        decoupled: Whether weight decay is applied to the weight, or added to the direction.
        momentum_first: Whether momentum adds up gradients, and the direction is that of the gradient with what momentum
            will make of it, as Nesterov looks ahead; or directions, and the step is momentum itself.
        nesterov_twice: The momentum of the authors' Eva-s, which keeps what Nesterov's look-ahead gives.
    """

    formula: str
    relative: bool = True
    divided: bool = False
    trust: str = ROW
    decoupled: bool = True
    momentum_first: bool = True
    nesterov_twice: bool = False


AUTHORS: dict[str, bool] = {"relative": False, "decoupled": False, "momentum_first": False}
"""What all of the authors' rules have in common."""


@dataclass(frozen=True)
class Direction:
    """A layer's direction, as what is to be taken off its gradient.

    Attributes:
        left: ``L``: groups, rows, rank.
        right: ``Rᵀ``: groups, rank, columns.
        bias_right: The column of ``Rᵀ`` that belongs to the bias: groups, rank.
        gradient_square: ``|G|²``.
        agreement: ``P·G``.
        square: ``|P|²``.
        factor: What the direction is to be multiplied by besides its scale.
        row_squares: Of each row the square that its scale goes by, where scales are by rows: groups, rows.
        moves: Which rows are to move at all, if not all of them.
        next_outputs: The next step's output vector, where a step finds it: groups, rows.
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


def direction(
    manner: Manner,
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
    """The direction of one layer.

    Args:
        manner: Which formula, and what its damping means.
        damping: As the group has it.
        gradient: ``G``: groups, rows, columns.
        bias_gradient: The bias' column: groups, rows.
        gradient_square: ``|G|²`` with the bias'.
        inputs: ``a`` without the one of a bias: groups, columns.
        outputs: ``b``: groups, rows; not for Eva-f, nor where only the inputs' side is known.
        output_damping: Of the left side, if it is not that of the right one.
        moves: Which rows are to move: where momentum comes first, those that have a gradient in this step. Others would
            go on at full length for as long as momentum is not zero.
        pointwise: Whether to multiply and add up, which a compiler makes one pass with all else that
            reads the gradient, or to call for a product.
    """
    products = (gradient * inputs[:, None]).sum(-1) if pointwise else torch.bmm(gradient, inputs[..., None])[..., 0]
    inputs_square = inputs.square().sum(-1)
    if bias_gradient is not None:
        products = products + bias_gradient
        inputs_square = inputs_square + 1
    ones = None if bias_gradient is None else torch.ones_like(inputs_square)
    factor = 1 / damping if manner.divided else 1.0
    if manner.formula in (TWO_SIDED, LEADING) and outputs is not None:
        both = (damping, damping if output_damping is None else output_damping)
        given = (gradient, bias_gradient, gradient_square, inputs, outputs, products, inputs_square, moves)
        find = _two_sided if manner.formula == TWO_SIDED else _leading
        return find(manner, both, *given, pointwise=pointwise)
    row_squares = None
    if manner.formula != JOINT:
        on_inputs = _inverse(inputs_square, damping, manner)
        left = products * on_inputs[:, None]
        row_squares = _row_squares(manner, gradient, bias_gradient, products, twice(on_inputs, inputs_square))
    else:
        b = _present(outputs)
        size = inputs_square * b.square().sum(-1)
        left = b * ((b * products).sum(-1) * _inverse(size, damping, manner))[:, None]
    removed = (left * products).sum()
    square = gradient_square - 2 * removed + (left.square().sum(-1) * inputs_square).sum()
    return Direction(
        left[..., None],
        inputs[:, None],
        None if ones is None else ones[:, None],
        gradient_square,
        gradient_square - removed,
        _positive(square, gradient_square),
        factor,
        row_squares,
        moves,
    )


def _row_squares(
    manner: Manner,
    gradient: torch.Tensor,
    bias_gradient: torch.Tensor | None,
    products: torch.Tensor,
    twice_inputs: torch.Tensor,
) -> torch.Tensor | None:
    """Of each row of ``G (I - alpha a aᵀ)``, its square."""
    if manner.trust != ROW:
        return None
    rows = (gradient * gradient).sum(-1)
    if bias_gradient is not None:
        rows = rows + bias_gradient.square()
    return _positive(rows - twice_inputs[:, None] * products.square(), rows)


def twice(alpha: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """What ``|x|²`` loses by ``I - alpha a aᵀ``, per square of ``a·x``."""
    return alpha * (2 - alpha * square)


def _two_sided(
    manner: Manner,
    damping: tuple[Number, Number],
    gradient: torch.Tensor,
    bias_gradient: torch.Tensor | None,
    gradient_square: torch.Tensor,
    inputs: torch.Tensor,
    b: torch.Tensor,
    products: torch.Tensor,
    inputs_square: torch.Tensor,
    moves: torch.Tensor | None,
    *,
    pointwise: bool,
) -> Direction:
    outputs_square = b.square().sum(-1)
    on_inputs = _inverse(inputs_square, damping[0], manner)
    on_outputs = _inverse(outputs_square, damping[1], manner)
    across = (b * products).sum(-1)
    rows = (b[..., None] * gradient).sum(1) if pointwise else torch.bmm(b[:, None], gradient)[:, 0]
    left = torch.stack((products * on_inputs[:, None], b), -1)
    both = across * on_inputs * on_outputs
    right = torch.stack((inputs, rows * on_outputs[:, None] - inputs * both[:, None]), 1)
    rows_square = rows.square().sum(-1)
    bias_right = None
    if bias_gradient is not None:
        bias_row = (b * bias_gradient).sum(-1)
        rows_square = rows_square + bias_row.square()
        bias_right = torch.stack((torch.ones_like(both), bias_row * on_outputs - both), -1)
    products_square = products.square().sum(-1)
    twice_inputs, twice_outputs = twice(on_inputs, inputs_square), twice(on_outputs, outputs_square)
    row_squares = _row_squares(manner, gradient, bias_gradient, products, twice_inputs)
    if row_squares is not None:
        taken_off = on_outputs.square() * (rows_square - twice_inputs * across.square()).clamp_min(0)
        row_squares = row_squares + b.square() * taken_off[:, None]

    def inner(alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """What G loses in ``(I - beta b bᵀ) G (I - alpha a aᵀ) · G``."""
        return (alpha * products_square + beta * rows_square - (alpha * across) * (beta * across)).sum()

    square = gradient_square - inner(twice_inputs, twice_outputs)
    agreement = gradient_square - inner(on_inputs, on_outputs)
    factor = 1 / (damping[0] * damping[1]) if manner.divided else 1.0
    return Direction(
        left,
        right,
        bias_right,
        gradient_square,
        agreement,
        _positive(square, gradient_square),
        factor,
        row_squares,
        moves,
    )


def _leading(
    manner: Manner,
    damping: tuple[Number, Number],
    gradient: torch.Tensor,
    bias_gradient: torch.Tensor | None,
    gradient_square: torch.Tensor,
    inputs: torch.Tensor,
    outputs: torch.Tensor,
    products: torch.Tensor,
    inputs_square: torch.Tensor,
    moves: torch.Tensor | None,
    *,
    pointwise: bool,
) -> Direction:
    """Takes off a direction of the outputs that the steps before have found, and goes on looking for it.

    The first step only looks, from a vector of equal elements. Rows' squares would be exact if the direction were: a
    row is taken to be left with :data:`LEAST` of its square, and to be as long as what is taken off it, at least.
    """
    on_inputs = _inverse(inputs_square, damping[0], manner)
    is_known = (outputs != 0).any(-1, keepdim=True)
    u = torch.where(is_known, outputs, torch.full_like(outputs, outputs.shape[-1] ** -0.5))
    beta = is_known.to(u.dtype) / (1 + damping[1])
    across = (u * products).sum(-1)
    rows = (u[..., None] * gradient).sum(1) if pointwise else torch.bmm(u[:, None], gradient)[:, 0]
    taken = on_inputs * across
    rest = rows - inputs * taken[:, None]
    rest_square = rest.square().sum(-1)
    along_inputs = (rest * inputs).sum(-1)
    found = (gradient * rest[:, None]).sum(-1) if pointwise else torch.bmm(gradient, rest[..., None])[..., 0]
    agreement = (rest * rows).sum(-1)
    bias_right = None
    if bias_gradient is not None:
        bias_rows = (u * bias_gradient).sum(-1)
        bias_rest = bias_rows - taken
        rest_square = rest_square + bias_rest.square()
        along_inputs = along_inputs + bias_rest
        found = found + bias_gradient * bias_rest[:, None]
        agreement = agreement + bias_rest * bias_rows
        bias_right = torch.stack((torch.ones_like(taken), bias_rest), -1)
    found = found - products * (on_inputs * along_inputs)[:, None]
    # A product of two gradients; its square would leave the range of float32 long before theirs does.
    found = found * ratio(torch.ones_like(rest_square), rest_square.sqrt())[:, None]
    length = torch.linalg.vector_norm(found, dim=-1, keepdim=True)
    twice_inputs, twice_outputs = twice(on_inputs, inputs_square), (beta * (2 - beta))[:, 0]
    products_square = products.square().sum(-1)
    square = gradient_square - (twice_inputs * products_square + twice_outputs * rest_square).sum()
    row_squares = _row_squares(manner, gradient, bias_gradient, products, twice_inputs)
    if row_squares is not None:
        off = u.square() * rest_square[:, None]
        left_over = torch.maximum(row_squares - off * twice_outputs[:, None], LEAST * row_squares)
        row_squares = torch.maximum(left_over, off * beta * beta)
    return Direction(
        torch.stack((products * on_inputs[:, None], u * beta), -1),
        torch.stack((inputs, rest), 1),
        bias_right,
        gradient_square,
        gradient_square - (on_inputs * products_square + beta[:, 0] * agreement).sum(),
        _positive(square, gradient_square),
        1.0,
        row_squares,
        moves,
        torch.where(length > 0, found / torch.where(length > 0, length, torch.ones_like(length)), outputs),
    )


def _present(outputs: torch.Tensor | None) -> torch.Tensor:
    if outputs is None:
        raise TypeError("this formula needs an output vector")
    return outputs


def _inverse(size: torch.Tensor, damping: Number, manner: Manner) -> torch.Tensor:
    """One over a damped size; 0 where there is no vector, or one that has faded away: its square has no inverse."""
    bottom = size * (1 + damping) if manner.relative else size + damping
    has_inverse = bottom >= 4 * torch.finfo(bottom.dtype).tiny
    inverse = 1 / torch.where(has_inverse, bottom, torch.ones_like(bottom))
    return torch.where(has_inverse, inverse, torch.zeros_like(bottom))


def _positive(square: torch.Tensor, gradient_square: torch.Tensor) -> torch.Tensor:
    """A square that rounding may not have made negative."""
    return torch.maximum(square, torch.finfo(square.dtype).eps * gradient_square)


def local_scale(trust: str, found: Direction, weight_norm: torch.Tensor) -> torch.Tensor:
    """The scale of a layer's direction, where it is the layer's own: one number, or groups by rows by one.

    Args:
        trust: Which.
        found: The direction.
        weight_norm: What steps are measured by.
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
    if trust == GRADIENT_NORM:
        return ratio(found.gradient_square.sqrt(), found.square.sqrt())
    return torch.ones_like(weight_norm) * found.factor


def common_scale(trust: str, found: list[Direction], rates: list[Number], kl_clip: Number) -> torch.Tensor:
    """The one scale of all layers' directions."""
    if trust == RESCALE:
        squares = [d.square * d.factor**2 for d in found]
        return ratio(sum_of([d.gradient_square for d in found]).sqrt(), sum_of(squares).sqrt())
    agreements = [d.agreement * d.factor for d in found]
    if trust == NORMALIZE:
        total = sum_of(agreements).clamp_min(0)
        return ratio(torch.ones_like(total), total.sqrt())
    changes = [agreement * rate * rate for agreement, rate in zip(agreements, rates, strict=True)]
    total = sum_of(changes).clamp_min(0)
    limited = torch.sqrt(kl_clip / total)
    return torch.where(total > 0, limited, torch.ones_like(total)).clamp_max(1.0)


def sum_of(values: list[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors without dimensions."""
    return torch.stack(values).sum()


def ratio(top: torch.Tensor, bottom: torch.Tensor) -> torch.Tensor:
    """A quotient, or 0 where it has none."""
    return torch.where(bottom > 0, top / bottom, torch.zeros_like(bottom))
