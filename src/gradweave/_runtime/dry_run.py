"""Runs of a model that its user has not asked for, and of which nothing may be left."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from gradweave._compat.eager import hooks_suspended


def silent_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module that has its parameters, and of what else it has a copy: buffers, counters, caches.

    Hooks stay behind, but for those by which torch computes weights. Raises what copying raises.
    """
    own: dict[int, Any] = {id(p): p for p in module.parameters()}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                own[id(value)] = value  # such as a pruned weight, which cannot be copied, and is computed anew
    with hooks_suspended(module):
        return copy.deepcopy(module, memo=own)


@contextmanager
def unseen(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Context for a run that leaves no trace: gives what to run, a copy that shares the module's parameters.

    Of a module that cannot be copied it is the module itself, without its hooks, and with its buffers put back.
    Random numbers go on where they were: torch's, Python's and NumPy's.
    """
    try:
        runs = silent_copy(module)
        stays: AbstractContextManager[None] = nullcontext()
    except Exception:  # whatever a module's own parts raise
        runs, stays = module, _put_back(module)
    with random_numbers_kept(device), stays:
        yield runs


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with hooks_suspended(module):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Context behind which random numbers go on where they were: torch's, Python's and NumPy's."""
    numpy: Any = sys.modules.get("numpy")
    python, others = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(others)
