# mypy: ignore-errors
"""Triton kernels of layers' vectors: those that a step goes by, and those of the next one.

Tables are as in :mod:`gradweave.optim.kernels.step_triton`.
"""

import triton
import triton.language as tl


@triton.jit
def address_of(table, index):
    """A tensor's memory, of which a table holds the address."""
    return tl.load(table + index).to(tl.pointer_type(tl.float32))


@triton.jit
def is_finite(x):
    """Whether numbers are neither infinite nor none at all."""
    return tl.abs(x) <= 3.4028234e38


@triton.jit
def look(layers, fixed, layer_numbers, block: tl.constexpr):
    """Of each layer: whether what was caught is of use, its places, and whether there is an input vector yet."""
    layer = tl.program_id(0)
    inputs = tl.load(layers + layer * 8).to(tl.int32)
    length = tl.load(layers + layer * 8 + 2).to(tl.int32)
    record = address_of(fixed, layer * 8 + 4)
    old_inputs = address_of(fixed, layer * 8 + 5)
    at = tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for start in range(0, length, block):
        total += tl.load(record + start + at, mask=start + at < length, other=0.0)
    seen_inputs = tl.zeros([block], tl.float32)
    for start in range(0, inputs, block):
        old = tl.load(old_inputs + start + at, mask=start + at < inputs, other=0.0)
        seen_inputs = tl.maximum(seen_inputs, tl.where(old != 0, 1.0, 0.0))
    count = tl.load(record + inputs)
    useful = (count > 0) & is_finite(tl.sum(total, 0))
    tl.store(layer_numbers + layer * 8, tl.where(useful, 1.0, 0.0))
    tl.store(layer_numbers + layer * 8 + 1, tl.where(count > 0, count, 1.0))
    tl.store(layer_numbers + layer * 8 + 2, tl.max(seen_inputs, 0))


@triton.jit
def _blended(old, new, seen, useful, weight):
    blended = tl.where(seen > 0, old + (new - old) * weight, new)
    return tl.where(useful > 0, blended, old)


@triton.jit(do_not_specialize=["first"])
def blend(matrices, fixed, layer_numbers, matrix_numbers, vectors, weight, first, block: tl.constexpr):
    """The input vector that each matrix will have if the step is taken, its square, and its output vector."""
    matrix = first + tl.program_id(0)
    row = matrices + matrix * 24
    layer = tl.load(row)
    group = tl.load(row + 1)
    inputs = tl.load(row + 5).to(tl.int32)
    outputs = tl.load(row + 6).to(tl.int32)
    new_inputs = vectors + tl.load(row + 7)
    new_outputs = vectors + tl.load(row + 8)
    useful = tl.load(layer_numbers + layer * 8)
    count = tl.load(layer_numbers + layer * 8 + 1)
    seen_inputs = tl.load(layer_numbers + layer * 8 + 2)
    record = address_of(fixed, layer * 8 + 4)
    caught = record + group * inputs
    old_inputs = address_of(fixed, layer * 8 + 5) + group * inputs
    at = tl.arange(0, block)
    square = tl.zeros([block], tl.float32)
    for start in range(0, inputs, block):
        inside = start + at < inputs
        old = tl.load(old_inputs + start + at, mask=inside, other=0.0)
        new = tl.load(caught + start + at, mask=inside, other=0.0) / count
        new = _blended(old, new, seen_inputs, useful, weight)
        tl.store(new_inputs + start + at, new, mask=inside)
        square += tl.where(inside, new * new, 0.0)
    tl.store(matrix_numbers + matrix * 8 + 6, tl.sum(square, 0))

    # Where no step has found an output vector yet, the first one looks for it from equal elements.
    old_outputs = address_of(fixed, layer * 8 + 6) + group * outputs
    known = tl.zeros([block], tl.float32)
    for start in range(0, outputs, block):
        old = tl.load(old_outputs + start + at, mask=start + at < outputs, other=0.0)
        known = tl.maximum(known, tl.where(old != 0, 1.0, 0.0))
    is_known = tl.max(known, 0)
    equal = 1.0 / tl.sqrt(tl.maximum(outputs, 1).to(tl.float32))
    for start in range(0, outputs, block):
        inside = start + at < outputs
        old = tl.load(old_outputs + start + at, mask=inside, other=0.0)
        tl.store(new_outputs + start + at, tl.where(is_known > 0, old, equal), mask=inside)
    tl.store(matrix_numbers + matrix * 8 + 7, is_known)


@triton.jit
def _found(parts, count, rows, at, inside):
    """What parts of columns gave of a product with rows."""
    total = tl.load(parts + at, mask=inside, other=0.0)
    for part in range(1, count):
        total += tl.load(parts + part * rows + at, mask=inside, other=0.0)
    return total


@triton.jit
def commit(layers, matrices, fixed, vectors, keep, block: tl.constexpr):
    """New vectors become those of the next step if this one is taken; what was caught is gone in any case."""
    matrix = tl.program_id(0)
    row = matrices + matrix * 24
    layer = tl.load(row)
    group = tl.load(row + 1)
    inputs = tl.load(row + 5).to(tl.int32)
    outputs = tl.load(row + 6).to(tl.int32)
    new_inputs = vectors + tl.load(row + 7)
    found_parts = vectors + tl.load(row + 13)
    count = tl.load(row + 16).to(tl.int32)
    all_inputs = tl.load(layers + layer * 8)
    record = address_of(fixed, layer * 8 + 4)
    caught = record + group * inputs
    old_inputs = address_of(fixed, layer * 8 + 5) + group * inputs
    old_outputs = address_of(fixed, layer * 8 + 6) + group * outputs
    taken = tl.load(keep) != 0
    at = tl.arange(0, block)
    nothing = tl.zeros([block], tl.float32)
    for start in range(0, inputs, block):
        inside = start + at < inputs
        new = tl.load(new_inputs + start + at, mask=inside, other=0.0)
        tl.store(old_inputs + start + at, new, mask=inside & taken)
        tl.store(caught + start + at, nothing, mask=inside)
    square = tl.zeros([block], tl.float32)
    for start in range(0, tl.where(taken, outputs, 0), block):
        new = _found(found_parts, count, outputs, start + at, start + at < outputs)
        square += new * new
    length = tl.sqrt(tl.sum(square, 0))
    for start in range(0, tl.where(length > 0, outputs, 0), block):
        inside = start + at < outputs
        new = _found(found_parts, count, outputs, start + at, inside)
        tl.store(old_outputs + start + at, new / length, mask=inside)
    tl.store(record + all_inputs, 0.0, mask=group == 0)
