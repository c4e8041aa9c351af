"""What autocast has cast once, for all calls until its context ends."""

from __future__ import annotations

import threading
from typing import Any

import torch

from gradweave._compat.eager import is_view, notes_of_node


class Casts(threading.local):
    """Notes that live exactly as long as what autocast keeps: each thread's, up to the end of its outermost context.

    Autograd sums the gradients of such a copy up in low precision, over all forwards in that context. Torch does
    not say when it forgets its copies, so a tensor without elements is cast along, and the notes stay with its copy.
    """

    def __init__(self) -> None:
        self._alongside: dict[torch.device, torch.Tensor] = {}

    def kept(self, device: torch.device) -> dict[Any, Any]:
        """The notes of the context that the calling thread is in."""
        if device not in self._alongside:
            self._alongside[device] = torch.empty(0, 0, device=device, requires_grad=True)
        empty = self._alongside[device]
        product = torch.mm(empty, empty)
        if product.grad_fn is None or product.dtype is empty.dtype:  # autocast is off
            return {}
        return notes_of_node(product.grad_fn.next_functions[0][0])


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the precision in which autocast, if it is on, has a tensor used in linear and convolution calls."""
    device = tensor.device.type
    if tensor.is_floating_point() and tensor.dtype is not torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def is_cast_once(tensor: torch.Tensor) -> bool:
    """Whether autocast casts a tensor for the first call that uses it, and keeps the copy for the others."""
    return (
        tensor.is_leaf
        and tensor.requires_grad
        and tensor.dtype is torch.float32
        and torch.is_autocast_cache_enabled()
        and not is_view(tensor)
    )
