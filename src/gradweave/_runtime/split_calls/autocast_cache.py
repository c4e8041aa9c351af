"""Notes that live as long as the copies that autocast caches."""

from __future__ import annotations

import threading
from typing import Any

import torch

from gradweave._compat.autograd import notes_of_node
from gradweave._compat.tensors import is_view


class AutocastNotes(threading.local):
    """Notes with the lifetime of autocast's cache: one set per thread, up to the end of its outermost context.

    Autocast casts a leaf once per context. All forwards in that context share the copy, and autograd sums the gradients
    of the copy in low precision before it casts them back: split calls must do the same to get the same bits.
    """

    def __init__(self) -> None:
        self._probes: dict[torch.device, torch.Tensor] = {}

    def of_context(self, device: torch.device) -> dict[Any, Any]:
        """Return the notes of the autocast context that the calling thread is in; an empty dict outside of one."""
        # Torch announces neither a new cache nor the end of one. So a probe without elements is cast along: its copy
        # is in the cache as all others are, and the notes hang on the node of autograd that made this copy.
        if device not in self._probes:
            self._probes[device] = torch.empty(0, 0, device=device, requires_grad=True)
        probe = self._probes[device]
        product = torch.mm(probe, probe)
        if product.grad_fn is None or product.dtype is probe.dtype:  # autocast is off
            return {}
        return notes_of_node(product.grad_fn.next_functions[0][0])


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the precision in which linear and convolution calls use a tensor under the current autocast state."""
    device = tensor.device.type
    if tensor.is_floating_point() and tensor.dtype is not torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def is_cast_once(tensor: torch.Tensor) -> bool:
    """Return whether autocast caches the copy of a tensor, so that all calls in the context share it."""
    return (
        tensor.is_leaf
        and tensor.requires_grad
        and tensor.dtype is torch.float32
        and torch.is_autocast_cache_enabled()
        and not is_view(tensor)
    )
