"""Runs of a model that its user did not start and that must leave no trace."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from gradweave._compat.modules import hooks_suspended


def silent_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its parameters and has its own buffers, counters and caches.

    Hooks are not copied, except for those with which torch computes weights. Raises what copying raises.
    """
    own: dict[int, Any] = {id(p): p for p in module.parameters()}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                # Deepcopy refuses tensors with a graph, such as a pruned weight; the next forward recomputes it.
                own[id(value)] = value
    with hooks_suspended(module):
        return copy.deepcopy(module, memo=own)


@contextmanager
def unseen(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """Return a context for a run that leaves no trace; it yields the module to run.

    That is a copy that shares the module's parameters or, if the module cannot be copied, the module itself without its
    hooks and with its buffers restored afterwards. The random number generators of torch, Python and NumPy are
    restored.
    """
    try:
        runs = silent_copy(module)
        stays: AbstractContextManager[None] = nullcontext()
    except Exception:  # __deepcopy__ of any of the module's parts may raise anything
        runs, stays = module, _restored_buffers(module)
    with random_numbers_kept(device), stays:
        yield runs


@contextmanager
def _restored_buffers(module: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with hooks_suspended(module):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextmanager
def random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Return a context that restores the random number generators of torch, Python and NumPy at its end."""
    numpy: Any = sys.modules.get("numpy")
    python, others = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(others)
