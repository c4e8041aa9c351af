# mypy: ignore-errors
"""Triton kernels of SGD and AdamW, for parameters without vectors: each program takes a chunk of one tensor.

Tables are described in :mod:`gradweave.optim.kernels.step_tables`.
"""

import triton
import triton.language as tl

from gradweave.optim.kernels.launch_triton import columns_of
from gradweave.optim.kernels.step_tables import ChunkRow, FirstOrderTensors

CHUNK = columns_of(ChunkRow)
TENSOR = columns_of(FirstOrderTensors)


@triton.jit
def _load_pointer(addresses, index, aligned: tl.constexpr):
    pointer = tl.load(addresses + index).to(tl.pointer_type(tl.float32))
    if aligned:  # an address from a table has no known divisibility; with the hint accesses are of 16 bytes
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _elements_of(chunks, chunk, aligned: tl.constexpr, block: tl.constexpr):
    """Return the indices of a chunk's elements in their tensor, and which of them there are."""
    start = tl.load(chunks + chunk * CHUNK.width + CHUNK.start)
    end = tl.load(chunks + chunk * CHUNK.width + CHUNK.end)
    if aligned:  # of the end too: it decides whether a mask is the same for all elements of a wide access
        start = tl.multiple_of(start, 4)
        end = tl.multiple_of(end, 4)
    at = start + tl.arange(0, block)
    return at, at < end


@triton.jit(do_not_specialize=["first"])
def measure_chunks(chunks, gradients, squares, inverse_scale, first, aligned: tl.constexpr, block: tl.constexpr):
    """Write the square of each chunk's gradient, without the loss scale."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunks + chunk * CHUNK.width + CHUNK.tensor)
    at, mask = _elements_of(chunks, chunk, aligned, block)
    g = tl.load(_load_pointer(gradients, tensor, aligned) + at, mask=mask, other=0.0) * tl.load(inverse_scale)
    tl.store(squares + chunk, tl.sum(g * g, 0))


@triton.jit(do_not_specialize=["first"])
def update_sgd(
    chunks, addresses, gradients, keep, inverse_scale, rate, momentum, decay, sign, first,
    rate_is_tensor: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Update a chunk by SGD with momentum, if the step is taken."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunks + chunk * CHUNK.width + CHUNK.tensor)
    at, mask = _elements_of(chunks, chunk, aligned, block)
    mask = mask & (tl.load(keep) != 0)
    lr = rate
    if rate_is_tensor:
        lr = tl.load(rate).to(tl.float32)
    weight = _load_pointer(addresses, tensor * TENSOR.width + TENSOR.parameter, aligned) + at
    buffer = _load_pointer(addresses, tensor * TENSOR.width + TENSOR.first_moment, aligned) + at
    g = tl.load(_load_pointer(gradients, tensor, aligned) + at, mask=mask, other=0.0) * (tl.load(inverse_scale) * sign)
    p = tl.load(weight, mask=mask, other=0.0)
    new = tl.load(buffer, mask=mask, other=0.0) * momentum + g + p * decay
    tl.store(buffer, new, mask=mask)
    tl.store(weight, p - new * lr, mask=mask)


@triton.jit(do_not_specialize=["count"])
def count_steps(addresses, keep, count, block: tl.constexpr):
    """Count a step of every tensor that has a number of steps, if the step is taken.

    In a launch of its own, before :func:`update_adamw`: all chunks of a tensor read its number.
    """
    tensor = tl.program_id(0) * block + tl.arange(0, block)
    address = tl.load(addresses + tensor * TENSOR.width + TENSOR.step, mask=tensor < count, other=0)
    steps = address.to(tl.pointer_type(tl.float32))
    there = address != 0
    tl.store(steps, tl.load(steps, mask=there, other=0.0) + tl.load(keep).to(tl.float32), mask=there)


@triton.jit
def _bias_correction(steps, log_beta):
    """Return what a moment is divided by, 1 - beta ** steps; in float64, as a small difference of numbers near 1."""
    return (1 - tl.exp(steps.to(tl.float64) * log_beta)).to(tl.float32)


@triton.jit(do_not_specialize=["first"])
def update_adamw(
    chunks, addresses, gradients, keep, inverse_scale, rate, beta1, rest1, log_beta1, beta2, rest2, log_beta2, eps,
    decay, sign, first, rate_is_tensor: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Update a chunk by AdamW, if the step is taken; its tensor's steps are counted already."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunks + chunk * CHUNK.width + CHUNK.tensor)
    at, mask = _elements_of(chunks, chunk, aligned, block)
    mask = mask & (tl.load(keep) != 0)
    lr = rate
    if rate_is_tensor:
        lr = tl.load(rate).to(tl.float32)
    weight = _load_pointer(addresses, tensor * TENSOR.width + TENSOR.parameter, aligned) + at
    first_moment = _load_pointer(addresses, tensor * TENSOR.width + TENSOR.first_moment, aligned) + at
    second_moment = _load_pointer(addresses, tensor * TENSOR.width + TENSOR.second_moment, aligned) + at
    g = tl.load(_load_pointer(gradients, tensor, aligned) + at, mask=mask, other=0.0) * (tl.load(inverse_scale) * sign)
    p = tl.load(weight, mask=mask, other=0.0)
    mean = tl.load(first_moment, mask=mask, other=0.0) * beta1 + g * rest1
    variance = tl.load(second_moment, mask=mask, other=0.0) * beta2 + g * g * rest2
    tl.store(first_moment, mean, mask=mask)
    tl.store(second_moment, variance, mask=mask)
    # A step that is not taken may have been counted no step yet: the divisor, masked out below, must not be zero.
    steps = tl.maximum(tl.load(_load_pointer(addresses, tensor * TENSOR.width + TENSOR.step, False)), 1.0)
    size = tl.sqrt(variance / _bias_correction(steps, log_beta2)) + eps
    change = mean / _bias_correction(steps, log_beta1) / size + p * decay
    tl.store(weight, p - change * lr, mask=mask)
