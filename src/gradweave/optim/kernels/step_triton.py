# mypy: ignore-errors
"""Triton kernels of Eva's and Eva-f's step, in the order of their launches; each is for many tensors.

A weight is seen as it is stored: ``X``, its gradient with what momentum will make of it, has rows and columns, a
vector ``u`` on its rows, another one ``v`` on its columns, and maybe a bias, which is one more column. With
``q = X v`` and ``w = uᵀ X``::

    P = X - alpha q vᵀ - beta u (w - alpha (u·q) v)ᵀ

is every direction: Eva's, Eva-f's (``u`` is zero) and those of weights that are stored transposed (``u`` is the input
vector, ``v`` zero). Eva's next ``u`` is the product of what the first term leaves of ``X`` with the bracket. Each row
of ``P`` is given one length, as :mod:`gradweave.optim.rules` says, by ``|X|²`` of the row, less multiples of ``q²``
and of ``u²``; rows without a gradient in this step do not move. Weights that are stored transposed have one scale.

Gradient and momentum are read twice, since scales need sums over whole layers before the first weight can be written:
:func:`measure_tiles` takes these sums, :func:`update_tiles` writes momentum and weight. ``P`` is never stored. Sums
are made of parts in a fixed order, without atomics: a step is the same each time.

Tables are described in :mod:`gradweave.optim.kernels.step_tables`; parameters named ``addresses`` and ``gradients``
are tables of addresses, and ``vectors``, ``block_sums``, ``matrix_numbers`` and ``layer_numbers`` scratch memory.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from gradweave.optim.kernels.launch_triton import Constants, columns_of, load_pointer
from gradweave.optim.kernels.step_tables import (
    BlockRow,
    BlockSums,
    GradientTensors,
    LayerNumbers,
    LayerRow,
    LayerTensors,
    MatrixNumbers,
    MatrixRow,
    TileRow,
)

LAYER = columns_of(LayerRow)
MATRIX = columns_of(MatrixRow)
TILE = columns_of(TileRow)
BLOCK = columns_of(BlockRow)
TENSOR = columns_of(LayerTensors)
GRADIENT = columns_of(GradientTensors)
BLOCK_SUM = columns_of(BlockSums)
MATRIX_NUMBER = columns_of(MatrixNumbers)
LAYER_NUMBER = columns_of(LayerNumbers)


class _Float32(NamedTuple):
    eps: float = 1.1920929e-07
    max: float = 3.4028234e38
    least_invertible: float = 4.7e-38
    """Four times the smallest normal number: the inverse of anything below would be close to infinity."""


FLOAT32 = Constants(_Float32())


@triton.jit
def _is_finite(x):
    return tl.abs(x) <= FLOAT32.max


@triton.jit
def inspect_records(layers, addresses, layer_numbers, block: tl.constexpr):
    """Write for each layer whether its record is of use, of how many places it is, and whether it has input vectors.

    One program per layer: each matrix of a layer depends on the whole record, and a launch is the only barrier between
    programs.
    """
    layer = tl.program_id(0)
    row = layers + layer * LAYER.width
    inputs = tl.load(row + LAYER.inputs).to(tl.int32)
    length = tl.load(row + LAYER.record_length).to(tl.int32)
    record = load_pointer(addresses, layer * TENSOR.width + TENSOR.record)
    old_inputs = load_pointer(addresses, layer * TENSOR.width + TENSOR.input_vector)
    lane = tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for start in range(0, length, block):
        total += tl.load(record + start + lane, mask=start + lane < length, other=0.0)
    seen_inputs = tl.zeros([block], tl.float32)
    for start in range(0, inputs, block):
        old = tl.load(old_inputs + start + lane, mask=start + lane < inputs, other=0.0)
        seen_inputs = tl.maximum(seen_inputs, tl.where(old != 0, 1.0, 0.0))
    # The number of places follows the sums of inputs. One sum tells whether all are finite.
    count = tl.load(record + inputs)
    useful = (count > 0) & _is_finite(tl.sum(total, 0))
    numbers = layer_numbers + layer * LAYER_NUMBER.width
    tl.store(numbers + LAYER_NUMBER.is_useful, tl.where(useful, 1.0, 0.0))
    tl.store(numbers + LAYER_NUMBER.places, tl.where(count > 0, count, 1.0))
    tl.store(numbers + LAYER_NUMBER.has_inputs, tl.max(seen_inputs, 0))


@triton.jit
def _running_average(old, new, has_old, is_useful, weight):
    """Return the next running average; the first vector is taken as it is."""
    blended = tl.where(has_old > 0, old + (new - old) * weight, new)
    return tl.where(is_useful > 0, blended, old)


@triton.jit(do_not_specialize=["first"])
def blend_vectors(matrices, addresses, layer_numbers, matrix_numbers, vectors, weight, first, block: tl.constexpr):
    """Write the vectors that each matrix will have if the step is taken, to scratch; and the input vector's square.

    State is not written before it is known whether the step is taken: :func:`commit_vectors` does.
    """
    matrix = first + tl.program_id(0)
    row = matrices + matrix * MATRIX.width
    layer = tl.load(row + MATRIX.layer)
    group = tl.load(row + MATRIX.group)
    inputs = tl.load(row + MATRIX.inputs).to(tl.int32)
    outputs = tl.load(row + MATRIX.outputs).to(tl.int32)
    new_inputs = vectors + tl.load(row + MATRIX.new_inputs_at)
    new_outputs = vectors + tl.load(row + MATRIX.new_outputs_at)
    numbers = layer_numbers + layer * LAYER_NUMBER.width
    is_useful = tl.load(numbers + LAYER_NUMBER.is_useful)
    count = tl.load(numbers + LAYER_NUMBER.places)
    has_inputs = tl.load(numbers + LAYER_NUMBER.has_inputs)
    record = load_pointer(addresses, layer * TENSOR.width + TENSOR.record)
    input_sums = record + group * inputs
    old_inputs = load_pointer(addresses, layer * TENSOR.width + TENSOR.input_vector) + group * inputs
    lane = tl.arange(0, block)
    square = tl.zeros([block], tl.float32)
    for start in range(0, inputs, block):
        inside = start + lane < inputs
        old = tl.load(old_inputs + start + lane, mask=inside, other=0.0)
        new = tl.load(input_sums + start + lane, mask=inside, other=0.0) / count
        new = _running_average(old, new, has_inputs, is_useful, weight)
        tl.store(new_inputs + start + lane, new, mask=inside)
        square += tl.where(inside, new * new, 0.0)
    numbers = matrix_numbers + matrix * MATRIX_NUMBER.width
    tl.store(numbers + MATRIX_NUMBER.inputs_square, tl.sum(square, 0))

    # Where no step has found an output vector yet, the first one looks for it from equal elements.
    old_outputs = load_pointer(addresses, layer * TENSOR.width + TENSOR.output_vector) + group * outputs
    known = tl.zeros([block], tl.float32)
    for start in range(0, outputs, block):
        old = tl.load(old_outputs + start + lane, mask=start + lane < outputs, other=0.0)
        known = tl.maximum(known, tl.where(old != 0, 1.0, 0.0))
    has_outputs = tl.max(known, 0)
    equal = 1.0 / tl.sqrt(tl.maximum(outputs, 1).to(tl.float32))
    for start in range(0, outputs, block):
        inside = start + lane < outputs
        old = tl.load(old_outputs + start + lane, mask=inside, other=0.0)
        tl.store(new_outputs + start + lane, tl.where(has_outputs > 0, old, equal), mask=inside)
    tl.store(numbers + MATRIX_NUMBER.has_outputs, has_outputs)


@triton.jit
def _load_v(vectors, v_at, column, inside, columns, taps):
    """Return elements of the vector on the columns, which has channels before taps, in the order of the columns."""
    channels = columns // taps
    element = tl.where(taps > 1, (column % channels) * taps + column // channels, column)
    return tl.load(vectors + v_at + element, mask=inside & (v_at >= 0), other=0.0)


@triton.jit
def _look_ahead(gradient, momentum_buffer, momentum):
    """Return a gradient with what momentum will make of it, in this step and the next one."""
    return gradient * (1 + momentum) + momentum_buffer * (momentum * momentum)


@triton.jit(do_not_specialize=["first"])
def measure_tiles(
    tiles, matrices, addresses, gradients, vectors, inverse_scale, momentum, sign, first,
    has_left: tl.constexpr, aligned: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Write a tile's parts of ``q``, of ``w``, of the squares of rows and of their largest gradients: the first pass.

    A program goes down its tile in strips of ``block_rows`` rows. Along a strip it reduces at once: parts of rows are
    complete. Down the tile it keeps a sum for each element of a strip, which is reduced once, after the loop: there is
    no reduction across warps in the loop for ``w``.

    Each tile writes its own part, and :func:`reduce_parts` adds them up: no program writes what another one does.
    """
    tile = tiles + (first + tl.program_id(0)) * TILE.width
    matrix = tl.load(tile + TILE.matrix)
    first_row = tl.load(tile + TILE.first_row).to(tl.int32)
    end_row = tl.load(tile + TILE.end_row).to(tl.int32)
    first_column = tl.load(tile + TILE.first_column).to(tl.int32)
    row = matrices + matrix * MATRIX.width
    layer = tl.load(row + MATRIX.layer)
    rows = tl.load(row + MATRIX.rows).to(tl.int32)
    columns = tl.load(row + MATRIX.columns).to(tl.int32)
    taps = tl.load(row + MATRIX.taps).to(tl.int32)
    u_at = tl.load(row + MATRIX.u_at)
    v_at = tl.load(row + MATRIX.v_at)
    q_parts = vectors + tl.load(row + MATRIX.q_parts_at) + (first_column // block_columns) * rows
    square_parts = q_parts + tl.load(row + MATRIX.q_parts) * rows
    largest_parts = square_parts + tl.load(row + MATRIX.q_parts) * rows
    w_parts = vectors + tl.load(row + MATRIX.w_parts_at)
    w_parts += (first_row // tl.load(row + MATRIX.tile_rows).to(tl.int32)) * columns
    start = tl.load(row + MATRIX.group) * rows * columns + first_row.to(tl.int64) * columns + first_column
    gradient = tl.load(gradients + layer * GRADIENT.width + GRADIENT.weight).to(tl.pointer_type(tl.float32))
    buffer = tl.load(addresses + layer * TENSOR.width + TENSOR.momentum).to(tl.pointer_type(tl.float32))
    if aligned:
        # What comes out of a table has no known divisibility: without these hints every read is of four bytes, with
        # them of sixteen. The host has checked that they hold. A hint belongs to the operation that made the value: on
        # the result of a call, such as load_pointer(), it would be lost when that is inlined.
        columns = tl.multiple_of(columns, 4)
        first_column = tl.multiple_of(first_column, 4)
        start = tl.multiple_of(start, 4)
        gradient = tl.multiple_of(gradient, 16)
        buffer = tl.multiple_of(buffer, 16)
    gradient += start
    buffer += start
    factor = tl.load(inverse_scale) * sign
    strip_row = tl.arange(0, block_rows)
    strip_column = tl.arange(0, block_columns)
    inside = first_column + strip_column < columns
    v = _load_v(vectors, v_at, first_column + strip_column, inside, columns, taps)
    u_sums = tl.zeros([block_rows, block_columns], tl.float32)
    for above in range(0, end_row - first_row, block_rows):
        present = first_row + above + strip_row < end_row
        mask = present[:, None] & inside[None, :]
        offset = (above + strip_row)[:, None] * columns + strip_column[None, :]
        x = tl.load(gradient + offset, mask=mask, other=0.0) * factor
        tl.store(largest_parts + first_row + above + strip_row, tl.max(tl.abs(x), 1), mask=present)
        x = _look_ahead(x, tl.load(buffer + offset, mask=mask, other=0.0), momentum)
        tl.store(q_parts + first_row + above + strip_row, tl.sum(x * v[None, :], 1), mask=present)
        tl.store(square_parts + first_row + above + strip_row, tl.sum(x * x, 1), mask=present)
        if has_left:
            u = tl.load(vectors + u_at + first_row + above + strip_row, mask=present & (u_at >= 0), other=0.0)
            u_sums += x * u[:, None]
    if has_left:
        tl.store(w_parts + first_column + strip_column, tl.sum(u_sums, 0), mask=inside)


@triton.jit(do_not_specialize=["first_block"])
def reduce_parts(
    blocks, matrices, addresses, gradients, vectors, block_sums, inverse_scale, momentum, sign, first_block,
    has_left: tl.constexpr, parts_at_once: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a block of ``q``, of rows' squares and largest gradients, or of a block of ``w``.

    What belongs to the bias is added here, where each row is looked at once.
    """
    number = first_block + tl.program_id(0)
    matrix = tl.load(blocks + number * BLOCK.width + BLOCK.matrix)
    of_columns = tl.load(blocks + number * BLOCK.width + BLOCK.is_of_columns)
    start = tl.load(blocks + number * BLOCK.width + BLOCK.start).to(tl.int32)
    row = matrices + matrix * MATRIX.width
    layer = tl.load(row + MATRIX.layer)
    rows = tl.load(row + MATRIX.rows).to(tl.int32)
    columns = tl.load(row + MATRIX.columns).to(tl.int32)
    u_at = tl.load(row + MATRIX.u_at)
    length = tl.where(of_columns > 0, columns, rows)
    whole = vectors + tl.where(of_columns > 0, tl.load(row + MATRIX.w_at), tl.load(row + MATRIX.q_at))
    parts = vectors + tl.where(of_columns > 0, tl.load(row + MATRIX.w_parts_at), tl.load(row + MATRIX.q_parts_at))
    count = tl.where(of_columns > 0, tl.load(row + MATRIX.w_parts), tl.load(row + MATRIX.q_parts)).to(tl.int32)
    at = start + tl.arange(0, block)
    inside = at < length
    lane = tl.arange(0, parts_at_once)
    total = tl.zeros([parts_at_once, block], tl.float32)
    for part in range(0, count, parts_at_once):
        mask = (part + lane < count)[:, None] & inside[None, :]
        total += tl.load(parts + (part + lane)[:, None] * length + at[None, :], mask=mask, other=0.0)
    product = tl.sum(total, 0)
    # Parts of squares and of largest gradients follow those of q. A block of w has none: its loops are empty.
    total = tl.zeros([parts_at_once, block], tl.float32)
    parts += count * rows
    for part in range(0, tl.where(of_columns > 0, 0, count), parts_at_once):
        mask = (part + lane < count)[:, None] & inside[None, :]
        total += tl.load(parts + (part + lane)[:, None] * rows + at[None, :], mask=mask, other=0.0)
    row_square = tl.sum(total, 0)
    most = tl.zeros([parts_at_once, block], tl.float32)
    parts += count * rows
    for part in range(0, tl.where(of_columns > 0, 0, count), parts_at_once):
        mask = (part + lane < count)[:, None] & inside[None, :]
        most = tl.maximum(most, tl.load(parts + (part + lane)[:, None] * rows + at[None, :], mask=mask, other=0.0))
    largest = tl.max(most, 0)
    # The bias has the input 1: its look-ahead gradient is added to q as it is. Its address is 0 if it has no gradient.
    bias_gradient = tl.load(gradients + layer * GRADIENT.width + GRADIENT.bias)
    has_bias = (bias_gradient != 0) & (tl.load(row + MATRIX.has_bias) > 0) & (of_columns == 0)
    bias = bias_gradient.to(tl.pointer_type(tl.float32)) + tl.load(row + MATRIX.group) * rows
    buffer = load_pointer(addresses, layer * TENSOR.width + TENSOR.bias_momentum) + tl.load(row + MATRIX.group) * rows
    g = tl.load(bias + at, mask=inside & has_bias, other=0.0) * (tl.load(inverse_scale) * sign)
    largest = tl.maximum(largest, tl.abs(g))
    g = _look_ahead(g, tl.load(buffer + at, mask=inside & has_bias, other=0.0), momentum)
    product += g
    row_square += g * g
    tl.store(whole + at, product, mask=inside)
    tl.store(whole + rows + at, row_square, mask=inside & (of_columns == 0))
    tl.store(whole + 2 * rows + at, largest, mask=inside & (of_columns == 0))
    square = tl.sum(product * product, 0)
    sums = block_sums + number * BLOCK_SUM.width
    tl.store(sums + BLOCK_SUM.q_square, tl.where(of_columns > 0, 0.0, square))
    tl.store(sums + BLOCK_SUM.row_squares, tl.sum(row_square, 0))
    tl.store(sums + BLOCK_SUM.w_square, tl.where(of_columns > 0, square, 0.0))
    tl.store(sums + BLOCK_SUM.largest, tl.max(largest, 0))
    u_q = 0.0
    u_bias = 0.0
    if has_left:
        u = tl.load(vectors + u_at + at, mask=inside & (u_at >= 0) & (of_columns == 0), other=0.0)
        u_q = tl.sum(u * product, 0)
        u_bias = tl.sum(u * g, 0)
    tl.store(sums + BLOCK_SUM.u_q, u_q)
    tl.store(sums + BLOCK_SUM.u_bias, u_bias)


@triton.jit
def _inverse(square, damping):
    """Return one over a damped square; 0 for one so small that it has no inverse in float32."""
    bottom = square * (1 + damping)
    has_inverse = bottom >= FLOAT32.least_invertible
    return tl.where(has_inverse, 1.0, 0.0) / tl.where(has_inverse, bottom, 1.0)


@triton.jit(do_not_specialize=["first"])
def find_matrix_numbers(
    matrices, block_sums, matrix_numbers, input_damping, output_damping, first, block: tl.constexpr
):
    """Write each matrix's alpha, beta and products, and the squares of its gradient and of what is taken off it."""
    matrix = first + tl.program_id(0)
    row = matrices + matrix * MATRIX.width
    first_block = tl.load(row + MATRIX.first_block).to(tl.int32)
    blocks = tl.load(row + MATRIX.blocks).to(tl.int32)
    has_bias = tl.load(row + MATRIX.has_bias) > 0
    is_transposed = tl.load(row + MATRIX.is_transposed) > 0
    lane = tl.arange(0, block)
    q_square = tl.zeros([block], tl.float32)
    u_q = tl.zeros([block], tl.float32)
    u_bias = tl.zeros([block], tl.float32)
    square = tl.zeros([block], tl.float32)
    w_square = tl.zeros([block], tl.float32)
    largest = tl.zeros([block], tl.float32)
    for start in range(0, blocks, block):
        inside = start + lane < blocks
        sums = block_sums + (first_block + start + lane) * BLOCK_SUM.width
        q_square += tl.load(sums + BLOCK_SUM.q_square, mask=inside, other=0.0)
        u_q += tl.load(sums + BLOCK_SUM.u_q, mask=inside, other=0.0)
        u_bias += tl.load(sums + BLOCK_SUM.u_bias, mask=inside, other=0.0)
        square += tl.load(sums + BLOCK_SUM.row_squares, mask=inside, other=0.0)
        w_square += tl.load(sums + BLOCK_SUM.w_square, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.load(sums + BLOCK_SUM.largest, mask=inside, other=0.0))
    total = tl.sum(square, 0)
    # tl.max drops NaNs: the largest of gradients that are all NaN is 0, as if there were no gradient. Their sum is not
    # finite, and has to count, for the step to be left out.
    has_gradient = (tl.max(largest, 0) != 0) | ~_is_finite(total)
    bias_row = tl.sum(u_bias, 0)
    across = tl.sum(u_q, 0)
    numbers = matrix_numbers + matrix * MATRIX_NUMBER.width
    inputs_square = tl.load(numbers + MATRIX_NUMBER.inputs_square) + tl.where(has_bias, 1.0, 0.0)
    has_outputs = tl.load(numbers + MATRIX_NUMBER.has_outputs)
    on_inputs = _inverse(inputs_square, input_damping)
    on_outputs = has_outputs / (1 + output_damping)
    twice_inputs = on_inputs * (2 - on_inputs * inputs_square)
    twice_outputs = on_outputs * (2 - on_outputs)
    alpha = tl.where(is_transposed, on_outputs, on_inputs)
    beta = tl.where(is_transposed, on_inputs, on_outputs)
    twice_alpha = tl.where(is_transposed, twice_outputs, twice_inputs)
    twice_beta = tl.where(is_transposed, twice_inputs, twice_outputs)
    across_rows = tl.sum(w_square, 0) + bias_row * bias_row
    rest_square = tl.maximum(across_rows - twice_alpha * across * across, 0.0)
    removed = twice_alpha * tl.sum(q_square, 0) + twice_beta * rest_square
    tl.store(numbers + MATRIX_NUMBER.alpha, alpha)
    tl.store(numbers + MATRIX_NUMBER.beta, beta)
    tl.store(numbers + MATRIX_NUMBER.alpha_uq, alpha * across)
    tl.store(numbers + MATRIX_NUMBER.u_bias, bias_row)
    tl.store(numbers + MATRIX_NUMBER.removed_square, tl.where(has_gradient, removed, 0.0))
    tl.store(numbers + MATRIX_NUMBER.square, tl.where(has_gradient, total, 0.0))
    tl.store(numbers + MATRIX_NUMBER.rest_square, rest_square)
    tl.store(numbers + MATRIX_NUMBER.twice_alpha, twice_alpha)


@triton.jit
def find_layer_numbers(layers, matrices, addresses, matrix_numbers, layer_numbers, squares, block: tl.constexpr):
    """Write each layer's square, the scale that gives its step the layer's size, and a row's share of that size."""
    layer = tl.program_id(0)
    row = layers + layer * LAYER.width
    first = tl.load(row + LAYER.first_matrix).to(tl.int32)
    count = tl.load(row + LAYER.matrices).to(tl.int32)
    size = tl.load(load_pointer(addresses, layer * TENSOR.width + TENSOR.size))
    lane = tl.arange(0, block)
    removed = tl.zeros([block], tl.float32)
    square = tl.zeros([block], tl.float32)
    for start in range(0, count, block):
        inside = start + lane < count
        numbers = matrix_numbers + (first + start + lane) * MATRIX_NUMBER.width
        removed += tl.load(numbers + MATRIX_NUMBER.removed_square, mask=inside, other=0.0)
        square += tl.load(numbers + MATRIX_NUMBER.square, mask=inside, other=0.0)
    gradient_square = tl.sum(square, 0)
    # A difference of two sums: rounding may not make it negative, nor zero.
    direction_square = tl.maximum(gradient_square - tl.sum(removed, 0), FLOAT32.eps * gradient_square)
    length = tl.sqrt(direction_square)
    scale = tl.where(length > 0, size, 0.0) / tl.where(length > 0, length, 1.0)
    numbers = layer_numbers + layer * LAYER_NUMBER.width
    tl.store(numbers + LAYER_NUMBER.scale, scale)
    rows = tl.load(matrices + first * MATRIX.width + MATRIX.rows) * count
    tl.store(numbers + LAYER_NUMBER.row_size, size / tl.sqrt(rows.to(tl.float32)))
    tl.store(squares + layer, gradient_square)


@triton.jit
def _load_rows(
    vectors, q, rows, u_at, at, present, alpha, twice_alpha, beta, rest_square, row_size, layer_scale,
    is_transposed, least, has_left: tl.constexpr,
):  # fmt: skip
    """Return of some rows their multiple of ``v`` that is taken off, their elements of ``u``, and their scales."""
    q_elements = tl.load(q + at, mask=present, other=0.0)
    row_square = tl.load(q + rows + at, mask=present, other=0.0)
    largest = tl.load(q + 2 * rows + at, mask=present, other=0.0)
    row_square = tl.maximum(row_square - twice_alpha * q_elements * q_elements, FLOAT32.eps * row_square)
    u = q_elements
    if has_left:
        u = tl.load(vectors + u_at + at, mask=present & (u_at >= 0), other=0.0)
        off = u * u * rest_square
        row_square = tl.maximum(row_square - off * (beta * (2 - beta)), least * row_square)
        row_square = tl.maximum(row_square, off * beta * beta)
    length = tl.where(largest != 0, tl.sqrt(row_square), 0.0)
    row_scale = tl.where(length > 0, row_size, 0.0) / tl.where(length > 0, length, 1.0)
    return alpha * q_elements, u, tl.where(is_transposed, layer_scale, row_scale)


@triton.jit(do_not_specialize=["first"])
def update_tiles(
    tiles, matrices, addresses, gradients, vectors, matrix_numbers, layer_numbers, keep, inverse_scale, rate, momentum,
    decay, sign, least, first,
    has_left: tl.constexpr, rate_is_tensor: tl.constexpr, aligned: tl.constexpr,
    most_rows: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Update momentum and weight of a tile: the second pass. The first tile of each row also updates its bias.

    ``keep`` is part of every mask that writes: a step that is not taken reads little and writes nothing, and the host
    never has to know. For the next output vector, each tile writes its part of a product with rows where the parts of
    ``q`` were, which :func:`reduce_parts` has added up.
    """
    tile = tiles + (first + tl.program_id(0)) * TILE.width
    matrix = tl.load(tile + TILE.matrix)
    first_row = tl.load(tile + TILE.first_row).to(tl.int32)
    end_row = tl.load(tile + TILE.end_row).to(tl.int32)
    first_column = tl.load(tile + TILE.first_column).to(tl.int32)
    row = matrices + matrix * MATRIX.width
    layer = tl.load(row + MATRIX.layer)
    group = tl.load(row + MATRIX.group)
    rows = tl.load(row + MATRIX.rows).to(tl.int32)
    columns = tl.load(row + MATRIX.columns).to(tl.int32)
    taps = tl.load(row + MATRIX.taps).to(tl.int32)
    u_at = tl.load(row + MATRIX.u_at)
    v_at = tl.load(row + MATRIX.v_at)
    q = vectors + tl.load(row + MATRIX.q_at)
    w = vectors + tl.load(row + MATRIX.w_at)
    numbers = matrix_numbers + matrix * MATRIX_NUMBER.width
    layer_scale = tl.load(layer_numbers + layer * LAYER_NUMBER.width + LAYER_NUMBER.scale)
    row_size = tl.load(layer_numbers + layer * LAYER_NUMBER.width + LAYER_NUMBER.row_size)
    is_transposed = tl.load(row + MATRIX.is_transposed) > 0
    alpha = tl.load(numbers + MATRIX_NUMBER.alpha)
    rest_square = tl.load(numbers + MATRIX_NUMBER.rest_square)
    twice_alpha = tl.load(numbers + MATRIX_NUMBER.twice_alpha)
    beta = tl.load(numbers + MATRIX_NUMBER.beta)
    alpha_uq = tl.load(numbers + MATRIX_NUMBER.alpha_uq)
    lr = rate
    if rate_is_tensor:
        lr = tl.load(rate).to(tl.float32)
    shrink = 1 - lr * decay
    taken = tl.load(keep) != 0

    start = group * rows * columns + first_row.to(tl.int64) * columns + first_column
    gradient = tl.load(gradients + layer * GRADIENT.width + GRADIENT.weight).to(tl.pointer_type(tl.float32))
    weight = tl.load(addresses + layer * TENSOR.width + TENSOR.weight).to(tl.pointer_type(tl.float32))
    buffer = tl.load(addresses + layer * TENSOR.width + TENSOR.momentum).to(tl.pointer_type(tl.float32))
    if aligned:  # as in the first pass: hints that make accesses of four bytes such of sixteen
        columns = tl.multiple_of(columns, 4)
        first_column = tl.multiple_of(first_column, 4)
        start = tl.multiple_of(start, 4)
        gradient = tl.multiple_of(gradient, 16)
        weight = tl.multiple_of(weight, 16)
        buffer = tl.multiple_of(buffer, 16)
    gradient += start
    weight += start
    buffer += start
    strip_row = tl.arange(0, block_rows)
    strip_column = tl.arange(0, block_columns)
    inside = (first_column + strip_column < columns) & taken
    v = _load_v(vectors, v_at, first_column + strip_column, inside, columns, taps)
    right = v
    next_u_parts = vectors + tl.load(row + MATRIX.q_parts_at) + (first_column // block_columns) * rows
    if has_left:
        right = tl.load(w + first_column + strip_column, mask=inside & (u_at >= 0), other=0.0) - alpha_uq * v
    per_rest = tl.where(rest_square > 0, 1.0, 0.0) / tl.sqrt(tl.where(rest_square > 0, rest_square, 1.0))

    has_bias = (tl.load(row + MATRIX.has_bias) > 0) & (first_column == 0) & taken
    bias_gradient = tl.load(gradients + layer * GRADIENT.width + GRADIENT.bias)
    has_bias = has_bias & (bias_gradient != 0)
    bias_start = group * rows
    bias_gradients = bias_gradient.to(tl.pointer_type(tl.float32)) + bias_start
    bias_weights = load_pointer(addresses, layer * TENSOR.width + TENSOR.bias) + bias_start
    bias_buffers = load_pointer(addresses, layer * TENSOR.width + TENSOR.bias_momentum) + bias_start
    bias_right = tl.load(numbers + MATRIX_NUMBER.u_bias) - alpha_uq
    factor = tl.load(inverse_scale) * sign

    for above in range(0, end_row - first_row, block_rows):
        at = first_row + above + strip_row
        present = (at < end_row) & taken
        mask = present[:, None] & inside[None, :]
        offset = (above + strip_row)[:, None] * columns + strip_column[None, :]
        fresh = tl.load(gradient + offset, mask=mask, other=0.0) * factor
        old = tl.load(buffer + offset, mask=mask, other=0.0)
        x = _look_ahead(fresh, old, momentum)
        tl.store(buffer + offset, old * momentum + fresh, mask=mask)
        left, u, scale = _load_rows(
            vectors, q, rows, u_at, at, present, alpha, twice_alpha, beta, rest_square, row_size, layer_scale,
            is_transposed, least, has_left,
        )  # fmt: skip
        x -= left[:, None] * v[None, :]
        if has_left:
            # The bias' momentum is read here by each strip, and written below, once.
            fresh = tl.load(bias_gradients + at, mask=present & has_bias, other=0.0) * factor
            old = tl.load(bias_buffers + at, mask=present & has_bias, other=0.0)
            g = _look_ahead(fresh, old, momentum) - left
            next_u = tl.sum(x * right[None, :], 1) + tl.where(has_bias, g * bias_right, 0.0)
            tl.store(next_u_parts + at, next_u * per_rest, mask=present & (u_at >= 0))
            x -= (beta * u)[:, None] * right[None, :]
        x *= scale[:, None] * lr
        tl.store(weight + offset, tl.load(weight + offset, mask=mask, other=0.0) * shrink - x, mask=mask)

    # In the loop, several threads have read each element of the bias' momentum, some of them in other warps than those
    # that write it here: no warp may go on before all have read.
    tl.debug_barrier()
    at = first_row + tl.arange(0, most_rows)
    present = (at < end_row) & has_bias
    left, u, scale = _load_rows(
        vectors, q, rows, u_at, at, present, alpha, twice_alpha, beta, rest_square, row_size, layer_scale,
        is_transposed, least, has_left,
    )  # fmt: skip
    fresh = tl.load(bias_gradients + at, mask=present, other=0.0) * factor
    old = tl.load(bias_buffers + at, mask=present, other=0.0)
    g = _look_ahead(fresh, old, momentum) - left
    if has_left:
        g -= beta * u * bias_right
    bias = tl.load(bias_weights + at, mask=present, other=0.0)
    tl.store(bias_buffers + at, old * momentum + fresh, mask=present)
    tl.store(bias_weights + at, bias * shrink - g * (scale * lr), mask=present)


@triton.jit
def _next_u(parts, count, rows, at, inside):
    """Return elements of the next output vector, not normalized: the sum of what tiles have left."""
    total = tl.load(parts + at, mask=inside, other=0.0)
    for part in range(1, count):
        total += tl.load(parts + part * rows + at, mask=inside, other=0.0)
    return total


@triton.jit
def commit_vectors(layers, matrices, addresses, vectors, keep, block: tl.constexpr):
    """Write new vectors to the state if the step is taken, and clear the record in any case.

    One program goes through all of a vector, whose length is needed before its first element can be written; it adds up
    the parts once for each.
    """
    matrix = tl.program_id(0)
    row = matrices + matrix * MATRIX.width
    layer = tl.load(row + MATRIX.layer)
    group = tl.load(row + MATRIX.group)
    inputs = tl.load(row + MATRIX.inputs).to(tl.int32)
    outputs = tl.load(row + MATRIX.outputs).to(tl.int32)
    new_inputs = vectors + tl.load(row + MATRIX.new_inputs_at)
    next_u_parts = vectors + tl.load(row + MATRIX.q_parts_at)
    count = tl.load(row + MATRIX.q_parts).to(tl.int32)
    all_inputs = tl.load(layers + layer * LAYER.width + LAYER.inputs)
    record = load_pointer(addresses, layer * TENSOR.width + TENSOR.record)
    input_sums = record + group * inputs
    old_inputs = load_pointer(addresses, layer * TENSOR.width + TENSOR.input_vector) + group * inputs
    old_outputs = load_pointer(addresses, layer * TENSOR.width + TENSOR.output_vector) + group * outputs
    taken = tl.load(keep) != 0
    lane = tl.arange(0, block)
    zeros = tl.zeros([block], tl.float32)
    for start in range(0, inputs, block):
        inside = start + lane < inputs
        new = tl.load(new_inputs + start + lane, mask=inside, other=0.0)
        tl.store(old_inputs + start + lane, new, mask=inside & taken)
        tl.store(input_sums + start + lane, zeros, mask=inside)
    square = tl.zeros([block], tl.float32)
    for start in range(0, tl.where(taken, outputs, 0), block):
        new = _next_u(next_u_parts, count, outputs, start + lane, start + lane < outputs)
        square += new * new
    length = tl.sqrt(tl.sum(square, 0))
    for start in range(0, tl.where(length > 0, outputs, 0), block):
        inside = start + lane < outputs
        new = _next_u(next_u_parts, count, outputs, start + lane, inside)
        tl.store(old_outputs + start + lane, new / length, mask=inside)
    # The number of places is the layer's, and one of its matrices clears it.
    tl.store(record + all_inputs, 0.0, mask=group == 0)
