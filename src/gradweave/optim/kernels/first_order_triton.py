# mypy: ignore-errors
"""Triton kernels for what has no vectors, a chunk of a tensor for each program; and for tables of addresses.

Tables are as in :mod:`gradweave.optim.kernels.step_triton`.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["start", *(f"n{number}" for number in range(32))])
def write_numbers(
    table, start: tl.int64,
    n0: tl.int64, n1: tl.int64, n2: tl.int64, n3: tl.int64, n4: tl.int64, n5: tl.int64, n6: tl.int64,
    n7: tl.int64, n8: tl.int64, n9: tl.int64, n10: tl.int64, n11: tl.int64, n12: tl.int64, n13: tl.int64,
    n14: tl.int64, n15: tl.int64, n16: tl.int64, n17: tl.int64, n18: tl.int64, n19: tl.int64, n20: tl.int64,
    n21: tl.int64, n22: tl.int64, n23: tl.int64, n24: tl.int64, n25: tl.int64, n26: tl.int64, n27: tl.int64,
    n28: tl.int64, n29: tl.int64, n30: tl.int64, n31: tl.int64,
):  # fmt: skip
    """Writes 32 numbers, which travel as arguments: nothing waits, and a captured graph keeps them."""
    table += start
    tl.store(table + 0, n0)
    tl.store(table + 1, n1)
    tl.store(table + 2, n2)
    tl.store(table + 3, n3)
    tl.store(table + 4, n4)
    tl.store(table + 5, n5)
    tl.store(table + 6, n6)
    tl.store(table + 7, n7)
    tl.store(table + 8, n8)
    tl.store(table + 9, n9)
    tl.store(table + 10, n10)
    tl.store(table + 11, n11)
    tl.store(table + 12, n12)
    tl.store(table + 13, n13)
    tl.store(table + 14, n14)
    tl.store(table + 15, n15)
    tl.store(table + 16, n16)
    tl.store(table + 17, n17)
    tl.store(table + 18, n18)
    tl.store(table + 19, n19)
    tl.store(table + 20, n20)
    tl.store(table + 21, n21)
    tl.store(table + 22, n22)
    tl.store(table + 23, n23)
    tl.store(table + 24, n24)
    tl.store(table + 25, n25)
    tl.store(table + 26, n26)
    tl.store(table + 27, n27)
    tl.store(table + 28, n28)
    tl.store(table + 29, n29)
    tl.store(table + 30, n30)
    tl.store(table + 31, n31)


@triton.jit
def _flat(table, index, aligned: tl.constexpr):
    memory = tl.load(table + index).to(tl.pointer_type(tl.float32))
    if aligned:
        memory = tl.multiple_of(memory, 16)
    return memory


@triton.jit
def _places(chunks, chunk, aligned: tl.constexpr, block: tl.constexpr):
    """Where a chunk lies in its tensor, and what of it is there."""
    start = tl.load(chunks + chunk * 4 + 1)
    end = tl.load(chunks + chunk * 4 + 2)
    if aligned:
        start = tl.multiple_of(start, 4)
        end = tl.multiple_of(end, 4)
    at = start + tl.arange(0, block)
    return at, at < end


@triton.jit(do_not_specialize=["first"])
def measure_flat(chunks, gradients, squares, inverse, first, aligned: tl.constexpr, block: tl.constexpr):
    """The square of a chunk of a gradient that has no vectors, without the loss scale."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunks + chunk * 4)
    at, mask = _places(chunks, chunk, aligned, block)
    g = tl.load(_flat(gradients, tensor, aligned) + at, mask=mask, other=0.0) * tl.load(inverse)
    tl.store(squares + chunk, tl.sum(g * g, 0))


@triton.jit(do_not_specialize=["first"])
def apply_sgd(
    chunks, fixed, gradients, keep, inverse, rate, momentum, decay, sign, first,
    rate_is_tensor: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """SGD with momentum, for a chunk of a parameter without vectors."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunks + chunk * 4)
    at, mask = _places(chunks, chunk, aligned, block)
    mask = mask & (tl.load(keep) != 0)
    lr = rate
    if rate_is_tensor:
        lr = tl.load(rate).to(tl.float32)
    weight = _flat(fixed, tensor * 4, aligned) + at
    buffer = _flat(fixed, tensor * 4 + 1, aligned) + at
    g = tl.load(_flat(gradients, tensor, aligned) + at, mask=mask, other=0.0) * (tl.load(inverse) * sign)
    p = tl.load(weight, mask=mask, other=0.0)
    moved = tl.load(buffer, mask=mask, other=0.0) * momentum + g + p * decay
    tl.store(buffer, moved, mask=mask)
    tl.store(weight, p - moved * lr, mask=mask)


@triton.jit(do_not_specialize=["count"])
def count_steps(fixed, keep, count, block: tl.constexpr):
    """Counts a step of every tensor that has a number of them, if it is taken."""
    tensor = tl.program_id(0) * block + tl.arange(0, block)
    address = tl.load(fixed + tensor * 4 + 3, mask=tensor < count, other=0)
    steps = address.to(tl.pointer_type(tl.float32))
    there = address != 0
    tl.store(steps, tl.load(steps, mask=there, other=0.0) + tl.load(keep).to(tl.float32), mask=there)


@triton.jit
def _first_steps(steps, log_beta):
    """What a moment is to be divided by; in double precision, since it is a small difference of large numbers."""
    return (1 - tl.exp(steps.to(tl.float64) * log_beta)).to(tl.float32)


@triton.jit(do_not_specialize=["first"])
def apply_adamw(
    chunks, fixed, gradients, keep, inverse, rate, beta1, rest1, log_beta1, beta2, rest2, log_beta2, eps, decay, sign,
    first, rate_is_tensor: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """AdamW, for a chunk of a parameter without vectors, whose step is counted already."""
    chunk = first + tl.program_id(0)
    tensor = tl.load(chunks + chunk * 4)
    at, mask = _places(chunks, chunk, aligned, block)
    mask = mask & (tl.load(keep) != 0)
    lr = rate
    if rate_is_tensor:
        lr = tl.load(rate).to(tl.float32)
    weight = _flat(fixed, tensor * 4, aligned) + at
    first_moment = _flat(fixed, tensor * 4 + 1, aligned) + at
    second_moment = _flat(fixed, tensor * 4 + 2, aligned) + at
    g = tl.load(_flat(gradients, tensor, aligned) + at, mask=mask, other=0.0) * (tl.load(inverse) * sign)
    p = tl.load(weight, mask=mask, other=0.0)
    mean = tl.load(first_moment, mask=mask, other=0.0) * beta1 + g * rest1
    spread = tl.load(second_moment, mask=mask, other=0.0) * beta2 + g * g * rest2
    tl.store(first_moment, mean, mask=mask)
    tl.store(second_moment, spread, mask=mask)
    steps = tl.maximum(tl.load(tl.load(fixed + tensor * 4 + 3).to(tl.pointer_type(tl.float32))), 1.0)
    size = tl.sqrt(spread / _first_steps(steps, log_beta2)) + eps
    change = mean / _first_steps(steps, log_beta1) / size + p * decay
    tl.store(weight, p - change * lr, mask=mask)
