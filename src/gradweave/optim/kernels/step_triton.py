# mypy: ignore-errors
"""Triton kernels of Eva's and Eva-f's step: each for many tensors in one launch.

A weight is seen as it is stored: ``X``, its gradient with what momentum will make of it, with rows and columns, a
vector ``u`` on its rows, another one ``v`` on its columns, and maybe a bias, which is one more column. With
``q = X v`` and ``w = uᵀ X``::

    P = X - alpha q vᵀ - beta u (w - alpha (u·q) v)ᵀ

is every direction: Eva's, Eva-f's (``u`` is zero) and those of weights that are stored transposed (``u`` is the input
vector, ``v`` zero). Eva's next ``u`` is the product of what the first term leaves of ``X`` with the bracket. Each row
of ``P`` is given one length, as :mod:`gradweave.optim.rules` says, by ``|X|²`` of the row, less multiples of ``q²``
and of ``u²``; rows without a gradient in this step do not move.
Weights that are stored transposed have one scale. Gradient and momentum are read twice: :func:`measure` takes what the
scales need, :func:`apply` writes momentum and weight. Sums are made of parts in a fixed order, without atomics: a step
is the same each time.

Tables are of int64, a row for each thing; what their columns are, :mod:`gradweave.optim.kernels.step_tables` says.
"""

import triton
import triton.language as tl

from gradweave.optim.kernels.vectors_triton import address_of, is_finite


@triton.jit
def _column_vector(vectors, offset, at, inside, columns, taps):
    """The vector on the columns, in the order in which these are stored: taps may come before channels."""
    channels = columns // taps
    place = tl.where(taps > 1, (at % channels) * taps + at // channels, at)
    return tl.load(vectors + offset + place, mask=inside & (offset >= 0), other=0.0)


@triton.jit
def _ahead(gradient, buffer, momentum):
    """A gradient, with what momentum will make of it."""
    return gradient * (1 + momentum) + buffer * (momentum * momentum)


@triton.jit(do_not_specialize=["first"])
def measure(
    tiles, matrices, fixed, gradients, vectors, loss_scale, momentum, sign, first,
    with_left: tl.constexpr, aligned: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """The first pass: of a tile its part of ``q``, of ``w``, of the squares of rows and of their largest gradients."""
    tile = first + tl.program_id(0)
    matrix = tl.load(tiles + tile * 4)
    first_row = tl.load(tiles + tile * 4 + 1).to(tl.int32)
    end_row = tl.load(tiles + tile * 4 + 2).to(tl.int32)
    first_column = tl.load(tiles + tile * 4 + 3).to(tl.int32)
    row = matrices + matrix * 24
    layer = tl.load(row)
    rows = tl.load(row + 2).to(tl.int32)
    columns = tl.load(row + 3).to(tl.int32)
    taps = tl.load(row + 4).to(tl.int32)
    on_rows = tl.load(row + 9)
    on_columns = tl.load(row + 10)
    q_parts = vectors + tl.load(row + 13) + (first_column // block_columns) * rows
    square_parts = q_parts + tl.load(row + 16) * rows
    largest_parts = square_parts + tl.load(row + 16) * rows
    w_parts = vectors + tl.load(row + 14) + (first_row // tl.load(row + 15).to(tl.int32)) * columns
    start = tl.load(row + 1) * rows * columns + first_row.to(tl.int64) * columns + first_column
    gradient = tl.load(gradients + layer * 2).to(tl.pointer_type(tl.float32))
    buffer = tl.load(fixed + layer * 8 + 1).to(tl.pointer_type(tl.float32))
    if aligned:
        columns = tl.multiple_of(columns, 4)
        first_column = tl.multiple_of(first_column, 4)
        start = tl.multiple_of(start, 4)
        gradient = tl.multiple_of(gradient, 16)
        buffer = tl.multiple_of(buffer, 16)
    gradient += start
    buffer += start
    turn = tl.load(loss_scale) * sign
    down = tl.arange(0, block_rows)
    along = tl.arange(0, block_columns)
    inside = first_column + along < columns
    v = _column_vector(vectors, on_columns, first_column + along, inside, columns, taps)
    across = tl.zeros([block_rows, block_columns], tl.float32)
    for above in range(0, end_row - first_row, block_rows):
        present = first_row + above + down < end_row
        mask = present[:, None] & inside[None, :]
        place = (above + down)[:, None] * columns + along[None, :]
        part = tl.load(gradient + place, mask=mask, other=0.0) * turn
        tl.store(largest_parts + first_row + above + down, tl.max(tl.abs(part), 1), mask=present)
        part = _ahead(part, tl.load(buffer + place, mask=mask, other=0.0), momentum)
        tl.store(q_parts + first_row + above + down, tl.sum(part * v[None, :], 1), mask=present)
        tl.store(square_parts + first_row + above + down, tl.sum(part * part, 1), mask=present)
        if with_left:
            u = tl.load(vectors + on_rows + first_row + above + down, mask=present & (on_rows >= 0), other=0.0)
            across += part * u[:, None]
    if with_left:
        tl.store(w_parts + first_column + along, tl.sum(across, 0), mask=inside)


@triton.jit(do_not_specialize=["first_block"])
def gather(
    blocks, matrices, fixed, gradients, vectors, block_sums, loss_scale, momentum, sign, first_block,
    with_left: tl.constexpr, parts_at_once: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Puts together the parts of some elements of ``q``, of rows' squares and largest gradients, or of ``w``."""
    number = first_block + tl.program_id(0)
    matrix = tl.load(blocks + number * 4)
    of_columns = tl.load(blocks + number * 4 + 1)
    first = tl.load(blocks + number * 4 + 2).to(tl.int32)
    row = matrices + matrix * 24
    layer = tl.load(row)
    rows = tl.load(row + 2).to(tl.int32)
    columns = tl.load(row + 3).to(tl.int32)
    on_rows = tl.load(row + 9)
    length = tl.where(of_columns > 0, columns, rows)
    whole = vectors + tl.where(of_columns > 0, tl.load(row + 12), tl.load(row + 11))
    parts = vectors + tl.where(of_columns > 0, tl.load(row + 14), tl.load(row + 13))
    count = tl.where(of_columns > 0, tl.load(row + 17), tl.load(row + 16)).to(tl.int32)
    at = first + tl.arange(0, block)
    inside = at < length
    down = tl.arange(0, parts_at_once)
    total = tl.zeros([parts_at_once, block], tl.float32)
    for part in range(0, count, parts_at_once):
        mask = (part + down < count)[:, None] & inside[None, :]
        total += tl.load(parts + (part + down)[:, None] * length + at[None, :], mask=mask, other=0.0)
    found = tl.sum(total, 0)
    total = tl.zeros([parts_at_once, block], tl.float32)
    parts += count * rows
    for part in range(0, tl.where(of_columns > 0, 0, count), parts_at_once):
        mask = (part + down < count)[:, None] & inside[None, :]
        total += tl.load(parts + (part + down)[:, None] * rows + at[None, :], mask=mask, other=0.0)
    row_square = tl.sum(total, 0)
    most = tl.zeros([parts_at_once, block], tl.float32)
    parts += count * rows
    for part in range(0, tl.where(of_columns > 0, 0, count), parts_at_once):
        mask = (part + down < count)[:, None] & inside[None, :]
        most = tl.maximum(most, tl.load(parts + (part + down)[:, None] * rows + at[None, :], mask=mask, other=0.0))
    largest = tl.max(most, 0)
    bias_gradient = tl.load(gradients + layer * 2 + 1)
    has_bias = (bias_gradient != 0) & (tl.load(row + 22) > 0) & (of_columns == 0)
    bias = bias_gradient.to(tl.pointer_type(tl.float32)) + tl.load(row + 1) * rows
    buffer = address_of(fixed, layer * 8 + 3) + tl.load(row + 1) * rows
    g = tl.load(bias + at, mask=inside & has_bias, other=0.0) * (tl.load(loss_scale) * sign)
    largest = tl.maximum(largest, tl.abs(g))
    g = _ahead(g, tl.load(buffer + at, mask=inside & has_bias, other=0.0), momentum)
    found += g
    row_square += g * g
    tl.store(whole + at, found, mask=inside)
    tl.store(whole + rows + at, row_square, mask=inside & (of_columns == 0))
    tl.store(whole + 2 * rows + at, largest, mask=inside & (of_columns == 0))
    square = tl.sum(found * found, 0)
    tl.store(block_sums + number * 8, tl.where(of_columns > 0, 0.0, square))
    tl.store(block_sums + number * 8 + 3, tl.sum(row_square, 0))
    tl.store(block_sums + number * 8 + 4, tl.where(of_columns > 0, square, 0.0))
    tl.store(block_sums + number * 8 + 5, tl.max(largest, 0))
    uq = 0.0
    ug = 0.0
    if with_left:
        u = tl.load(vectors + on_rows + at, mask=inside & (on_rows >= 0) & (of_columns == 0), other=0.0)
        uq = tl.sum(u * found, 0)
        ug = tl.sum(u * g, 0)
    tl.store(block_sums + number * 8 + 1, uq)
    tl.store(block_sums + number * 8 + 2, ug)


@triton.jit
def _inverse(square, damping):
    """One over a damped square; 0 for one that is so small that it has no inverse in float32."""
    bottom = square * (1 + damping)
    return tl.where(bottom >= 4.7e-38, 1.0, 0.0) / tl.where(bottom >= 4.7e-38, bottom, 1.0)


@triton.jit(do_not_specialize=["first"])
def combine(matrices, block_sums, matrix_numbers, input_damping, output_damping, first, block: tl.constexpr):
    """Of each matrix: its factors, its square (0 if it has no gradient), and by how much the direction's is less."""
    matrix = first + tl.program_id(0)
    row = matrices + matrix * 24
    first_block = tl.load(row + 18).to(tl.int32)
    blocks = tl.load(row + 19).to(tl.int32)
    has_bias = tl.load(row + 22) > 0
    is_transposed = tl.load(row + 23) > 0
    at = tl.arange(0, block)
    q_square = tl.zeros([block], tl.float32)
    uq = tl.zeros([block], tl.float32)
    ug = tl.zeros([block], tl.float32)
    square = tl.zeros([block], tl.float32)
    w_square = tl.zeros([block], tl.float32)
    largest = tl.zeros([block], tl.float32)
    for start in range(0, blocks, block):
        inside = start + at < blocks
        sums = block_sums + (first_block + start + at) * 8
        q_square += tl.load(sums, mask=inside, other=0.0)
        uq += tl.load(sums + 1, mask=inside, other=0.0)
        ug += tl.load(sums + 2, mask=inside, other=0.0)
        square += tl.load(sums + 3, mask=inside, other=0.0)
        w_square += tl.load(sums + 4, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.load(sums + 5, mask=inside, other=0.0))
    total = tl.sum(square, 0)
    # A maximum leaves out what is not a number, and of such gradients alone it is zero.
    there = (tl.max(largest, 0) != 0) | ~is_finite(total)
    on_bias = tl.sum(ug, 0)
    across = tl.sum(uq, 0)
    inputs_square = tl.load(matrix_numbers + matrix * 8 + 6) + tl.where(has_bias, 1.0, 0.0)
    is_known = tl.load(matrix_numbers + matrix * 8 + 7)
    on_inputs = _inverse(inputs_square, input_damping)
    on_outputs = is_known / (1 + output_damping)
    twice_inputs = on_inputs * (2 - on_inputs * inputs_square)
    twice_outputs = on_outputs * (2 - on_outputs)
    alpha = tl.where(is_transposed, on_outputs, on_inputs)
    beta = tl.where(is_transposed, on_inputs, on_outputs)
    twice_alpha = tl.where(is_transposed, twice_outputs, twice_inputs)
    twice_beta = tl.where(is_transposed, twice_inputs, twice_outputs)
    across_rows = tl.sum(w_square, 0) + on_bias * on_bias
    rest_square = tl.maximum(across_rows - twice_alpha * across * across, 0.0)
    less = twice_alpha * tl.sum(q_square, 0) + twice_beta * rest_square
    numbers = matrix_numbers + matrix * 8
    tl.store(numbers, alpha)
    tl.store(numbers + 1, beta)
    tl.store(numbers + 2, alpha * across)
    tl.store(numbers + 3, on_bias)
    tl.store(numbers + 4, tl.where(there, less, 0.0))
    tl.store(numbers + 5, tl.where(there, total, 0.0))
    tl.store(numbers + 6, rest_square)
    tl.store(numbers + 7, twice_alpha)


@triton.jit
def settle(layers, matrices, fixed, matrix_numbers, layer_numbers, squares, block: tl.constexpr):
    """Of each layer: its square, the scale that gives its step the layer's size, and a row's share."""
    layer = tl.program_id(0)
    first = tl.load(layers + layer * 8 + 4).to(tl.int32)
    count = tl.load(layers + layer * 8 + 5).to(tl.int32)
    size = tl.load(address_of(fixed, layer * 8 + 7))
    at = tl.arange(0, block)
    less = tl.zeros([block], tl.float32)
    square = tl.zeros([block], tl.float32)
    for start in range(0, count, block):
        inside = start + at < count
        numbers = matrix_numbers + (first + start + at) * 8
        less += tl.load(numbers + 4, mask=inside, other=0.0)
        square += tl.load(numbers + 5, mask=inside, other=0.0)
    gradient_square = tl.sum(square, 0)
    direction_square = tl.maximum(gradient_square - tl.sum(less, 0), 1.1920929e-07 * gradient_square)
    length = tl.sqrt(direction_square)
    scale = tl.where(length > 0, size, 0.0) / tl.where(length > 0, length, 1.0)
    tl.store(layer_numbers + layer * 8 + 4, scale)
    rows = tl.load(matrices + first * 24 + 2) * count
    tl.store(layer_numbers + layer * 8 + 5, size / tl.sqrt(rows.to(tl.float32)))
    tl.store(squares + layer, gradient_square)


@triton.jit
def _of_rows(
    vectors, q, rows, on_rows, at, present, alpha, twice_alpha, beta, rest_square, row_size, layer_scale,
    is_transposed, least, with_left: tl.constexpr,
):  # fmt: skip
    """Of some rows: what is taken off along the columns' vector, the elements of the rows', and the scale."""
    along_v = tl.load(q + at, mask=present, other=0.0)
    row_square = tl.load(q + rows + at, mask=present, other=0.0)
    largest = tl.load(q + 2 * rows + at, mask=present, other=0.0)
    row_square = tl.maximum(row_square - twice_alpha * along_v * along_v, 1.1920929e-07 * row_square)
    u = along_v
    if with_left:
        u = tl.load(vectors + on_rows + at, mask=present & (on_rows >= 0), other=0.0)
        off = u * u * rest_square
        row_square = tl.maximum(row_square - off * (beta * (2 - beta)), least * row_square)
        row_square = tl.maximum(row_square, off * beta * beta)
    length = tl.where(largest != 0, tl.sqrt(row_square), 0.0)
    row_scale = tl.where(length > 0, row_size, 0.0) / tl.where(length > 0, length, 1.0)
    return alpha * along_v, u, tl.where(is_transposed, layer_scale, row_scale)


@triton.jit(do_not_specialize=["first"])
def apply(
    tiles, matrices, fixed, gradients, vectors, matrix_numbers, layer_numbers, keep, loss_scale, rate, momentum, decay,
    sign, least, first,
    with_left: tl.constexpr, rate_is_tensor: tl.constexpr, aligned: tl.constexpr,
    most_rows: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """The second pass: momentum and weight of a tile, and those of the bias beside its first columns."""
    tile = first + tl.program_id(0)
    matrix = tl.load(tiles + tile * 4)
    first_row = tl.load(tiles + tile * 4 + 1).to(tl.int32)
    end_row = tl.load(tiles + tile * 4 + 2).to(tl.int32)
    first_column = tl.load(tiles + tile * 4 + 3).to(tl.int32)
    row = matrices + matrix * 24
    layer = tl.load(row)
    group = tl.load(row + 1)
    rows = tl.load(row + 2).to(tl.int32)
    columns = tl.load(row + 3).to(tl.int32)
    taps = tl.load(row + 4).to(tl.int32)
    on_rows = tl.load(row + 9)
    on_columns = tl.load(row + 10)
    q = vectors + tl.load(row + 11)
    w = vectors + tl.load(row + 12)
    numbers = matrix_numbers + matrix * 8
    layer_scale = tl.load(layer_numbers + layer * 8 + 4)
    row_size = tl.load(layer_numbers + layer * 8 + 5)
    is_transposed = tl.load(row + 23) > 0
    alpha = tl.load(numbers)
    rest_square = tl.load(numbers + 6)
    twice_alpha = tl.load(numbers + 7)
    beta = tl.load(numbers + 1)
    both = tl.load(numbers + 2)
    lr = rate
    if rate_is_tensor:
        lr = tl.load(rate).to(tl.float32)
    shrink = 1 - lr * decay
    taken = tl.load(keep) != 0

    start = group * rows * columns + first_row.to(tl.int64) * columns + first_column
    gradient = tl.load(gradients + layer * 2).to(tl.pointer_type(tl.float32))
    weight = tl.load(fixed + layer * 8).to(tl.pointer_type(tl.float32))
    buffer = tl.load(fixed + layer * 8 + 1).to(tl.pointer_type(tl.float32))
    if aligned:
        columns = tl.multiple_of(columns, 4)
        first_column = tl.multiple_of(first_column, 4)
        start = tl.multiple_of(start, 4)
        gradient = tl.multiple_of(gradient, 16)
        weight = tl.multiple_of(weight, 16)
        buffer = tl.multiple_of(buffer, 16)
    gradient += start
    weight += start
    buffer += start
    down = tl.arange(0, block_rows)
    along = tl.arange(0, block_columns)
    inside = (first_column + along < columns) & taken
    v = _column_vector(vectors, on_columns, first_column + along, inside, columns, taps)
    right = v
    found_parts = vectors + tl.load(row + 13) + (first_column // block_columns) * rows
    if with_left:
        right = tl.load(w + first_column + along, mask=inside & (on_rows >= 0), other=0.0) - both * v
    per_rest = tl.where(rest_square > 0, 1.0, 0.0) / tl.sqrt(tl.where(rest_square > 0, rest_square, 1.0))

    has_bias = (tl.load(row + 22) > 0) & (first_column == 0) & taken
    bias_gradient = tl.load(gradients + layer * 2 + 1)
    has_bias = has_bias & (bias_gradient != 0)
    bias_start = group * rows
    bias_gradients = bias_gradient.to(tl.pointer_type(tl.float32)) + bias_start
    bias_weights = address_of(fixed, layer * 8 + 2) + bias_start
    bias_buffers = address_of(fixed, layer * 8 + 3) + bias_start
    bias_right = tl.load(numbers + 3) - both
    turn = tl.load(loss_scale) * sign

    for above in range(0, end_row - first_row, block_rows):
        at = first_row + above + down
        present = (at < end_row) & taken
        mask = present[:, None] & inside[None, :]
        place = (above + down)[:, None] * columns + along[None, :]
        fresh = tl.load(gradient + place, mask=mask, other=0.0) * turn
        moved = tl.load(buffer + place, mask=mask, other=0.0)
        part = _ahead(fresh, moved, momentum)
        tl.store(buffer + place, moved * momentum + fresh, mask=mask)
        left, u, scale = _of_rows(
            vectors, q, rows, on_rows, at, present, alpha, twice_alpha, beta, rest_square, row_size, layer_scale,
            is_transposed, least, with_left,
        )  # fmt: skip
        part -= left[:, None] * v[None, :]
        if with_left:
            fresh = tl.load(bias_gradients + at, mask=present & has_bias, other=0.0) * turn
            moved = tl.load(bias_buffers + at, mask=present & has_bias, other=0.0)
            g = _ahead(fresh, moved, momentum) - left
            found = tl.sum(part * right[None, :], 1) + tl.where(has_bias, g * bias_right, 0.0)
            tl.store(found_parts + at, found * per_rest, mask=present & (on_rows >= 0))
            part -= (beta * u)[:, None] * right[None, :]
        part *= scale[:, None] * lr
        tl.store(weight + place, tl.load(weight + place, mask=mask, other=0.0) * shrink - part, mask=mask)

    # Several threads have read each element of a bias' momentum: none may write it before all have.
    tl.debug_barrier()
    at = first_row + tl.arange(0, most_rows)
    present = (at < end_row) & has_bias
    left, u, scale = _of_rows(
        vectors, q, rows, on_rows, at, present, alpha, twice_alpha, beta, rest_square, row_size, layer_scale,
        is_transposed, least, with_left,
    )  # fmt: skip
    fresh = tl.load(bias_gradients + at, mask=present, other=0.0) * turn
    moved = tl.load(bias_buffers + at, mask=present, other=0.0)
    g = _ahead(fresh, moved, momentum) - left
    if with_left:
        g -= beta * u * bias_right
    bias = tl.load(bias_weights + at, mask=present, other=0.0)
    tl.store(bias_buffers + at, moved * momentum + fresh, mask=present)
    tl.store(bias_weights + at, bias * shrink - g * (scale * lr), mask=present)
