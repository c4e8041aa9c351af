"""Private names of tensors: who else refers to their memory, and how often it was changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from gradweave._compat.functions import no_torch_function

ITEM = torch.ops.aten._local_scalar_dense.default
"""The operation behind ``Tensor.item()``."""


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor with a tensor's memory, made without asking the tensor's class."""
    with no_torch_function():
        return torch.Tensor.detach(tensor)


def use_count(tensor: torch.Tensor) -> int:
    """Return how often C++ refers to a tensor; ``torch.utils.swap_tensors`` asks this first."""
    count: int = torch.Tensor._use_count(tensor)  # type: ignore[attr-defined]
    return count


def metadata_guard(cls: type[torch.Tensor], like: torch.Tensor) -> Any:
    """Return a tensor of a subclass that has the shape, strides, dtype and device of another one, and no data."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=False
    )


def asked_for_fake_tensor() -> bool:
    """Return whether torch calls the caller's method to make a tensor without data of another one."""
    return sys._getframe(2).f_globals.get("__name__") == "torch._subclasses.meta_utils"


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Return how often a tensor's memory has been changed in place."""


def stream_teller(device: torch.device) -> Callable[[], int]:
    """Return a function that tells the number of the current stream of a device; 0 for the default one."""
    return partial(torch._C._cuda_getCurrentRawStream, device.index) if device.type == "cuda" else int


def set_version(tensors: list[torch.Tensor], versions: list[int]) -> None:
    """Set how often tensors have been changed in place."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def memory_of(tensor: torch.Tensor) -> int:
    """Return the identity of the memory of a tensor, the same for all its views."""
    return int(tensor.untyped_storage()._cdata)


def storage_users(tensor: torch.Tensor) -> int:
    """Return the number of tensors that share a tensor's memory, itself included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # without the one that is asked here


_use_count: Callable[[int], int] = torch._C._storage_Use_Count


_references_to = sys.getrefcount


def is_sole_user(tensor: torch.Tensor) -> bool:
    """Return whether nothing else refers to a tensor's memory: no tensor, no storage, no array it was made from."""
    storage = tensor.untyped_storage()
    return (
        _use_count(storage._cdata) == _SOLE_USE and _references_to(storage) == _SOLE_REFERENCE and storage.resizable()
    )


def are_kept(grads: Sequence[torch.Tensor | None]) -> bool:
    """Return whether anything but ``.grad`` can see one of the gradients in a list, and could before this backward.

    A backward puts a new tensor into ``.grad``, whose version is 0, or adds in place to the one that is there.
    """
    return any(
        type(grad) is torch.Tensor
        and grad._version > 0
        and (_references_to(grad) > _REFERENCES_TO_GRADIENT or storage_users(grad) > 1)
        for grad in grads
    )


def _references_to_gradient() -> int:
    p = torch.nn.Parameter(torch.empty(1))
    p.grad = torch.empty(1)
    return next(_references_to(grad) for grad in [p.grad])


_REFERENCES_TO_GRADIENT = _references_to_gradient()
"""References to a gradient that is in ``.grad`` and in a list that a generator goes through."""


def _references() -> tuple[int, int]:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_SOLE_USE, _SOLE_REFERENCE = _references()
"""What both counts say of memory without another user, as they are asked here."""


def free_matmul_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for every thread and stream; it makes new ones when needed.

    An eager step leaves two on a GPU, of its forward's and its backward's thread: on an H200 64 MiB.
    """
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd knows a tensor as a view of another one."""
    return bool(tensor._is_view())
