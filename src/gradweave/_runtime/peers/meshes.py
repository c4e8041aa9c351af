"""The process group that a user means by a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gradweave.errors import ArgumentError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def group_of(mesh: DeviceMesh | dist.ProcessGroup | None, argument: str) -> dist.ProcessGroup | None:
    """Return the process group of a mesh of one dimension, or a group itself; None if it has one rank only, or is None.

    Args:
        mesh: What the user gave.
        argument: Name of the argument, for messages.

    Raises:
        ArgumentError: If it is no mesh of one dimension, or this rank is not in it.
    """
    if mesh is None:
        return None
    group: Any = mesh
    if not isinstance(mesh, dist.ProcessGroup):
        if not hasattr(mesh, "get_group"):
            raise ArgumentError(argument, type(mesh).__name__, "give a DeviceMesh, a process group, or None")
        if mesh.ndim != 1:
            raise ArgumentError(argument, mesh, 'give a mesh of one dimension, such as mesh["data"]')
        group = mesh.get_group()
    if dist.get_rank(group) < 0:
        raise ArgumentError(argument, mesh, "this rank is not in it; give each rank a mesh of its own")
    return group if dist.get_world_size(group) > 1 else None
