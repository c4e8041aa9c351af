"""What surrounds the layers while the runtime runs: autocast in forward only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class Precision:
    """Autocast as the user has set it around a step, for forwards and the loss alone: backward runs without."""

    def __init__(self, device: torch.device) -> None:
        self._device = device.type
        self._dtype: torch.dtype | None = None

    @contextmanager
    def left(self) -> Iterator[None]:
        """Context of a step."""
        if not torch.is_autocast_enabled(self._device):
            yield
            return
        self._dtype = torch.get_autocast_dtype(self._device)
        try:
            with torch.autocast(self._device, enabled=False):
                yield
        finally:
            self._dtype = None

    def used(self) -> AbstractContextManager[Any]:
        """Context of a forward."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device, self._dtype)
