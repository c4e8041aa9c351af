"""Random numbers that are drawn outside of torch: in a traced step they would be constants."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradweave.step_graph.errors import NotOneGraphError


@contextmanager
def refusing_drawn_numbers() -> Iterator[None]:
    """Context in which a step is traced: refuses numbers of Python's or NumPy's generators, which stay as they were."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate()
    numpy_before = None if numpy is None else numpy.random.get_state(legacy=False)
    drawn = None
    try:
        yield
    finally:
        if random.getstate() != before:
            drawn = "random"
            random.setstate(before)
        if numpy_before is not None and not _same(numpy.random.get_state(legacy=False), numpy_before):
            drawn = "numpy.random"
            numpy.random.set_state(numpy_before)
    if drawn is not None:
        raise NotOneGraphError(f"the step draws numbers with {drawn}, which would be the same in every step of a graph")


@contextmanager
def torch_numbers_kept(device: torch.device) -> Iterator[None]:
    """Context in which a step is made: torch's generators are afterwards as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def torch_numbers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of torch's generators."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_torch_numbers(device: torch.device, states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Makes them what they were."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


def _same(one: Any, other: Any) -> bool:
    """Whether two states of NumPy's generator are the same."""
    if isinstance(one, dict):
        return all(_same(one[key], other[key]) for key in one)
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)
