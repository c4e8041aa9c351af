"""Gradients that are still on their way: looking at one gives the average over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradweave._runtime.deferred.pending import pending_gradient_class


def pending_class(find_wait: Callable[[], Callable[[], None] | None]) -> type[torch.Tensor]:
    """A class that gradients take on while they are averaged.

    Any torch function given such a gradient waits first, which must give it back its own class.

    Args:
        find_wait: Gives what waits; None once there is nothing to wait for.
    """

    def wait(_: torch.Tensor) -> None:
        found = find_wait()
        if found is not None:
            found()

    return pending_gradient_class(wait)
