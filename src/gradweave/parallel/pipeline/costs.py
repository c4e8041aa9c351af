"""What layers and links cost, measured, in the form in which plans are made from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from gradweave.parallel.pipeline.process_group import Together
from gradweave.schedule.costs import Costs
from gradweave.schedule.links import Link

_SMALL, _LARGE, _TURNS = 1024, 4 << 20, 3


def measure_layers(
    model: nn.Sequential,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    batch: tuple[Any, Any],
    *,
    optimizer: Optimizer | None = None,
) -> Costs:
    """Measures what the layers of a model cost, on the device they are on, for :class:`Pipeline`.

    Args:
        model: The whole of it, or one of fewer layers of the same kinds.
        loss_fn: Called as ``loss_fn(output, target)``.
        batch: Input and target of one micro-batch.
        optimizer: Whose update is measured; None counts updates as those of plain SGD.
    """
    from gradweave.profile import measure_costs

    def loss(whole: nn.Module, x: Any, target: Any) -> torch.Tensor:
        return loss_fn(whole(x), target)

    return measure_costs(model, loss, optimizer or SGD(model.parameters(), lr=0.0), batch)


def measure_link(together: Together, device: torch.device) -> Link:
    """Latency and bandwidth between the first two ranks, from a small and a large message there and back.

    On a CPU also what a message takes of the cores that compute, at either end.
    """
    (small, few), (large, many) = (_there_and_back(together, size, device) for size in (_SMALL, _LARGE))
    found = None
    if together.rank == 0 and together.size > 1:
        bandwidth = 2 * (_LARGE - _SMALL) / max(large - small, 1e-9)
        of_cores = max(0.0, many - few) / 2 / (_LARGE - _SMALL) if device.type == "cpu" else 0.0
        found = Link(bandwidth, max(0.0, small / 2 - _SMALL / bandwidth), of_cores)
    link: Link | None = together.gather(found)[0]
    return link or Link()


def _there_and_back(together: Together, size: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a message there and back, and of this process's cores."""
    if together.rank > 1 or together.size == 1:
        return 0.0, 0.0
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    other, group = together.global_rank(1 - together.rank), together.group
    times, of_cores = [], []
    for _ in range(_TURNS + 1):
        began, busy = time.perf_counter(), time.process_time()
        if together.rank == 0:
            dist.send(message, dst=other, group=group)
            dist.recv(message, src=other, group=group)
        else:
            dist.recv(message, src=other, group=group)
            dist.send(message, dst=other, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
        of_cores.append(time.process_time() - busy)
    return min(times[1:]), min(of_cores[1:])
