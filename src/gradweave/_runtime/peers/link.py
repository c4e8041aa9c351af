"""What a link between ranks does, measured in two patterns of messages: all-reduces, and a message there and back.

Both are measured alike: the first exchange warms up connections, the fastest of a few more counts, and a slow link is
used less often. On a CPU both also measure what messages take of the cores that compute, as the loss of a computation
beside them: time that the kernel spends on a message, in whichever process, is part of that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch
import torch.distributed as dist

from gradweave.schedule.links import Link

_REPEATS = 5
"""Exchanges of which the fastest counts: a rank that is woken up late by a busy machine says nothing of the link."""
_MOST_SECONDS = 1.0
"""For all exchanges of one size; the first is made in any case."""
_FLOAT = 4
_SMALL, _LARGE = 1 << 10, 1 << 17
"""Elements of messages that are reduced."""
_AT_ONCE = 8
"""Messages that are reduced at the same time, as those of a training step are."""
_SHORT, _LONG, _GROWTH = 1 << 10, 4 << 20, 16
"""Bytes of messages there and back, and the factor from one length to the next."""
_MATRIX, _PRODUCTS = 96, 100
"""Of the computation that messages disturb: a product takes some tens of microseconds."""


def measure_all_reduce(group: dist.ProcessGroup | None, device: torch.device, most_bytes: int) -> Link:
    """Measure averaging over a group: latency and bandwidth that are the same on all ranks, those of the slowest.

    On a CPU, copies of gradients to the message and of averages back count as time of the cores too. What is sent
    takes about as long as a training step or two.

    Args:
        group: Whose ranks; None for the default group.
        device: Where their tensors are.
        most_bytes: That messages which are under way together hold: no more than a step's, but for tiny models.
    """
    ranks = dist.get_world_size(group)
    large_size = max(4 * _SMALL, min(_LARGE, most_bytes // (_FLOAT * _AT_ONCE)))
    small, _ = _all_reduce_seconds(group, device, _SMALL)
    large, repeats = _all_reduce_seconds(group, device, large_size)
    of_cores = 0.0
    if device.type == "cpu":
        message = torch.zeros(large_size * _AT_ONCE, dtype=torch.float32, device="cpu")
        lost = _seconds_lost_beside(lambda: _wait(dist.all_reduce(message, group=group, async_op=True)), group, repeats)
        of_cores = (lost + 2 * _copy_seconds(message, repeats)) / message.nbytes
    small, large, of_cores = _largest(group, device, small, large, of_cores)
    per_byte = max(large - small, 1e-9) / (_FLOAT * (large_size - _SMALL))
    unit = Link(1.0, 0.0).all_reduce_seconds(1, ranks)
    depth = Link(math.inf, 1.0).all_reduce_seconds(0, ranks)
    return Link(unit / per_byte, max(small - _FLOAT * _SMALL * per_byte, 0.0) / depth, of_cores)


def measure_round_trip(group: dist.ProcessGroup | None, device: torch.device) -> Link:
    """Measure messages between the first two ranks of a group: the same link on all ranks, which all call it.

    Args:
        group: Whose ranks; None for the default group.
        device: Where tensors are; on a CPU a byte's time of the cores is that at either end.
    """
    if dist.get_world_size(group) == 1:
        return Link()
    short, _ = _round_trip_seconds(group, device, _SHORT)
    size, seconds = _SHORT, short
    while size < _LONG and seconds < _MOST_SECONDS / 4:
        size *= _GROWTH
        (seconds,) = _largest(group, device, _clocked(_round_trip(group, device, size), device))
    long, repeats = _round_trip_seconds(group, device, size)
    of_cores = 0.0
    if device.type == "cpu":
        of_cores = _seconds_lost_beside(_round_trip(group, device, size), group, repeats) / (2 * size)
    short, long, of_cores = _largest(group, device, short, long, of_cores)
    bandwidth = 2 * (size - _SHORT) / max(long - short, 1e-9)
    return Link(bandwidth, max(0.0, short / 2 - _SHORT / bandwidth), of_cores)


def _all_reduce_seconds(group: dist.ProcessGroup | None, device: torch.device, elements: int) -> tuple[float, int]:
    """Seconds of one all-reduce, out of several under way together, and how often these were made."""
    messages = [torch.zeros(elements, dtype=torch.float32, device=device) for _ in range(_AT_ONCE)]

    def exchange() -> None:
        for work in [dist.all_reduce(message, group=group, async_op=True) for message in messages]:
            _wait(work)

    seconds, repeats = _least_seconds(exchange, group, device)
    return seconds / _AT_ONCE, repeats


def _round_trip_seconds(group: dist.ProcessGroup | None, device: torch.device, size: int) -> tuple[float, int]:
    """Seconds of a message there and back, and how often it was sent."""
    return _least_seconds(_round_trip(group, device, size), group, device)


def _round_trip(group: dist.ProcessGroup | None, device: torch.device, size: int) -> Callable[[], None] | None:
    """Return what sends a message of some bytes from the first rank to the second, and back; None on other ranks."""
    rank = dist.get_rank(group)
    if rank > 1:
        return None
    other = dist.get_process_group_ranks(group or dist.group.WORLD)[1 - rank]
    message = torch.zeros(size, dtype=torch.uint8, device=device)

    def send_first() -> None:
        dist.send(message, dst=other, group=group)
        dist.recv(message, src=other, group=group)

    def receive_first() -> None:
        dist.recv(message, src=other, group=group)
        dist.send(message, dst=other, group=group)

    return send_first if rank == 0 else receive_first


def _least_seconds(
    exchange: Callable[[], None] | None, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[float, int]:
    """Seconds of an exchange, the fastest of those after the first, and how many these were.

    The first counts if it took so long that it is the only one.

    Args:
        exchange: What is measured; None on a rank that has no part in it.
        group: All of its ranks come here, and make the same number of exchanges.
        device: Where messages are.
    """
    (first,) = _largest(group, device, _clocked(exchange, device))
    repeats = min(_REPEATS, int(_MOST_SECONDS / max(first, 1e-9)))
    return (min(_clocked(exchange, device) for _ in range(repeats)), repeats) if repeats else (first, 1)


def _clocked(exchange: Callable[[], None] | None, device: torch.device) -> float:
    """Make an exchange; return its seconds, or zero on a rank that has no part in it."""
    if exchange is None:
        return 0.0
    # On a GPU, messages are only queued by the calls: the clock starts and stops at an empty queue.
    synchronize: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    exchange()
    synchronize()
    return time.perf_counter() - began


def _seconds_lost_beside(exchange: Callable[[], None] | None, group: dist.ProcessGroup | None, repeats: int) -> float:
    """Seconds by which matrix products fall behind while an exchange is under way on another thread."""
    matrix = torch.ones(_MATRIX, _MATRIX, dtype=torch.float32, device="cpu")

    def products(is_over: Callable[[int], bool]) -> tuple[int, float]:
        done, began = 0, time.perf_counter()
        while not is_over(done):
            torch.mm(matrix, matrix)
            done += 1
        return done, time.perf_counter() - began

    def enough(done: int) -> bool:
        return done >= _PRODUCTS

    products(enough)
    lost = [0.0]
    with ThreadPoolExecutor(1, thread_name_prefix="gradweave link") as beside:
        for _ in range(repeats):
            # Ranks on the same cores disturb each other: all compute at the same time, with and without messages.
            dist.barrier(group=group)
            if exchange is None:
                continue
            alone = min(products(enough)[1] for _ in range(3)) / _PRODUCTS
            transfer = beside.submit(exchange)
            done, spent = products(lambda _, transfer=transfer: transfer.done())  # type: ignore[misc]
            transfer.result()
            lost.append(max(spent - done * alone, 0.0))
    return median(lost[1:] or lost)


def _copy_seconds(message: torch.Tensor, repeats: int) -> float:
    """Seconds of copying gradients into a message of their size."""
    gradients = torch.zeros_like(message)

    def copy() -> None:
        message.copy_(gradients)

    return median(_clocked(copy, message.device) for _ in range(repeats))


def _largest(group: dist.ProcessGroup | None, device: torch.device, *seconds: float) -> list[float]:
    """Return the largest of all ranks' numbers, on all ranks."""
    together = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
    return list(together.tolist())


def _wait(work: dist.Work | None) -> None:
    """Wait for a message, which is None for a rank that has no part in its group."""
    if work is not None:
        work.wait()
