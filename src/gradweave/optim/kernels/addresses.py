"""Tables of addresses on a device, by which one launch finds many tensors."""

from __future__ import annotations

from typing import Any

import torch

_WRITTEN_AT_ONCE = 32


class Addresses:
    """A table of addresses on the device, and what it holds."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._size = -(-max(count, 1) // _WRITTEN_AT_ONCE) * _WRITTEN_AT_ONCE
        self._table = torch.zeros(self._size, dtype=torch.int64, device=device)
        self._known = [0] * self._size
        self._is_in_graph = False
        self._in_graphs: list[torch.Tensor] = []

    def _leave_to_graph(self) -> None:
        """Begins anew: a graph goes on reading the table as it is."""
        self._in_graphs.append(self._table)
        self._table, self._known, self._is_in_graph = torch.zeros_like(self._table), [0] * self._size, False

    def holding(self, addresses: list[int], kernels: Any, *, capturing: bool, moves: bool) -> torch.Tensor:
        """A table with these addresses.

        Args:
            addresses: What it is to hold.
            kernels: Their module.
            capturing: Whether a CUDA graph is being captured, which writes what it reads by itself.
            moves: Whether these are of tensors that a step makes anew; a graph shares the others' table.
        """
        wanted = addresses + [0] * (self._size - len(addresses))
        if not moves and wanted == self._known:
            self._is_in_graph = self._is_in_graph or capturing
            return self._table
        if self._is_in_graph and not capturing:
            self._leave_to_graph()
        table = torch.empty_like(self._table) if capturing else self._table
        for start in range(0, self._size, _WRITTEN_AT_ONCE):
            part = wanted[start : start + _WRITTEN_AT_ONCE]
            if capturing or part != self._known[start : start + _WRITTEN_AT_ONCE]:
                kernels.write_numbers[(1,)](table, start, *part)
        if not capturing:
            self._known = wanted
        return table
