"""Whether the gradients of a first step are those of a backward, rather than put there by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class FirstBackward:
    """Listens at some leaves until it is let go.

    Not by hooks of the leaves, which others count and by which gradients would be delivered in other ways.

    Args:
        leaves: Parameters that need a gradient.
    """

    def __init__(self, leaves: Iterable[torch.Tensor]) -> None:
        heard: list[bool] = []
        self._heard = heard
        self._nodes = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
        self._handles = [node.register_prehook(lambda _: _note(heard)) for node in self._nodes]

    @property
    def has_run(self) -> bool:
        """Whether a backward has come to one of them."""
        return bool(self._heard)

    def let_go(self) -> None:
        """Listens no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


def _note(heard: list[bool]) -> Any:
    if not heard:
        heard.append(True)
