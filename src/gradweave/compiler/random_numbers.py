"""Random numbers and traced steps: torch's generators go on as in an eager step, others are refused."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from gradweave.step_graph.errors import NotOneGraphError


class GeneratorStates(NamedTuple):
    """The states of torch's default generators; that of a GPU is None if the step runs on the CPU."""

    cpu: torch.Tensor
    gpu: torch.Tensor | None


def generator_states(device: torch.device) -> GeneratorStates:
    """Return the states of torch's default generators."""
    return GeneratorStates(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)


def restore_generators(device: torch.device, states: GeneratorStates) -> None:
    """Set torch's default generators to earlier states."""
    torch.set_rng_state(states.cpu)
    if states.gpu is not None:
        torch.cuda.set_rng_state(states.gpu, device)


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Return a context that leaves torch's default generators as they were: tracing draws no numbers of the user's."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextmanager
def refuse_python_random() -> Iterator[None]:
    """Return a context that raises if Python's or NumPy's generator was used in it, and resets them.

    Only torch's generators are operations of a graph. A number of another one would be a constant, the same in every
    step.

    Raises:
        NotOneGraphError: If a number was drawn.
    """
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
        if numpy_before is not None and not _equal(numpy.random.get_state(legacy=False), numpy_before):
            drawn = "numpy.random"
            numpy.random.set_state(numpy_before)
    if drawn is not None:
        raise NotOneGraphError(f"the step draws numbers with {drawn}, which would be the same in every step of a graph")


def _equal(one: Any, other: Any) -> bool:
    """Return whether two states of NumPy's generator are equal."""
    if isinstance(one, dict):
        return all(_equal(one[key], other[key]) for key in one)
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)
