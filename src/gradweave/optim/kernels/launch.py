"""Launching kernels: which devices have them, CUDA graph capture, and tables of tensors' addresses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from gradweave._logging import announce

VECTORIZED_BYTES = 16
"""Size of the widest access of a thread; hints of kernels promise that memory begins at multiples of it."""
_MIN_CAPABILITY = (7, 0)
_ADDRESSES_PER_LAUNCH = 32
"""Number of addresses that ``write_addresses`` takes as arguments."""


def has_kernels(device: torch.device) -> bool:
    """Return whether Triton kernels can be launched on a device."""
    return device.type == "cuda" and _is_known_to_triton(device)


@cache
def _is_known_to_triton(device: torch.device) -> bool:
    if find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY:
        return True
    announce(f"optim: no kernels of our own on {device}, since Triton is not installed or does not support it")
    return False


def is_capturing(device: torch.device) -> bool:
    """Return whether launches on a device are being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on a device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def triton_module(name: str) -> Any:
    """Import one of this package's modules of Triton kernels; only where they run, since Triton is optional."""
    return import_module(f"gradweave.optim.kernels.{name}")


class AddressTable:
    """Addresses of tensors, in a tensor on the device, by which a kernel for many tensors finds them.

    Addresses travel to the device as arguments of a kernel, which a captured graph replays as they were. A copy from
    pageable host memory would wait for the device, and a captured one from pinned memory would read what the host has
    written there by the time of a replay.

    Args:
        count: Number of addresses.
        device: Where the table is.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._size = -(-max(count, 1) // _ADDRESSES_PER_LAUNCH) * _ADDRESSES_PER_LAUNCH
        self._table = torch.zeros(self._size, dtype=torch.int64, device=device)
        self._written = [0] * self._size
        self._is_in_graph = False
        self._tables_of_graphs: list[torch.Tensor] = []

    def write(self, addresses: Sequence[int], *, capturing: bool, changes_each_step: bool) -> torch.Tensor:
        """Return a table that holds some addresses, after writing those that have changed.

        Args:
            addresses: The addresses, at most as many as the table is for.
            capturing: Whether a CUDA graph is being captured.
            changes_each_step: Whether each step allocates these tensors, as it does gradients. A captured graph then
                gets a table of its own, which it fills at each replay; otherwise it shares the eager one while that
                is up to date.
        """
        wanted = [*addresses, *[0] * (self._size - len(addresses))]
        if not changes_each_step and wanted == self._written:
            self._is_in_graph = self._is_in_graph or capturing
            return self._table
        if self._is_in_graph and not capturing:
            self._leave_to_graph()
        # Nothing is known about memory from the graph's pool: all of it is written, as part of the graph.
        table = torch.empty_like(self._table) if capturing else self._table
        kernels = triton_module("launch_triton")
        for start in range(0, self._size, _ADDRESSES_PER_LAUNCH):
            part = wanted[start : start + _ADDRESSES_PER_LAUNCH]
            if capturing or part != self._written[start : start + _ADDRESSES_PER_LAUNCH]:
                kernels.write_addresses[(1,)](table, start, *part)
        if not capturing:
            self._written = wanted
        return table

    def _leave_to_graph(self) -> None:
        """Start a new table, since replays go on reading the present one."""
        self._tables_of_graphs.append(self._table)
        self._table, self._written = torch.zeros_like(self._table), [0] * self._size
        self._is_in_graph = False
