"""The nodes, their ranks, and the process groups between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gradweave._runtime.peers.groups import check_group_counts, end_group, new_group
from gradweave.errors import UnsupportedError

DIMENSIONS = ("node", "local")


@dataclass(frozen=True)
class Topology:
    """Nodes with the same number of ranks, and the place of this process among them.

    Attributes:
        ranks: Global ranks of each node; a rank's index in its node is its place.
        node: Index of this process's node.
        place: This process's place in its node.
    """

    ranks: tuple[tuple[int, ...], ...] = ((0,),)
    node: int = 0
    place: int = 0

    @staticmethod
    def of(mesh: DeviceMesh | None) -> Topology:
        """Return the topology of a mesh, or that of the job as its launcher set it up if there is no mesh."""
        if mesh is None:
            return Topology._of_launcher()
        if mesh.mesh_dim_names != DIMENSIONS:
            raise UnsupportedError(
                "the mesh",
                f"its dimensions are {mesh.mesh_dim_names}",
                f"give one with dimensions {DIMENSIONS}, or none to have it made from LOCAL_WORLD_SIZE",
            )
        return Topology._around(tuple(tuple(row) for row in mesh.mesh.tolist()))

    @staticmethod
    def _of_launcher() -> Topology:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return Topology()
        world, local = dist.get_world_size(), os.environ.get("LOCAL_WORLD_SIZE", "")
        if not local.isdigit() or int(local) < 1 or world % int(local):
            raise UnsupportedError(
                "the environment",
                f"LOCAL_WORLD_SIZE={local!r} does not divide the {world} ranks into nodes of the same size",
                "run under torchrun with the same number of ranks on each node, or give a mesh",
            )
        size = int(local)
        return Topology._around(tuple(tuple(range(first, first + size)) for first in range(0, world, size)))

    @staticmethod
    def _around(ranks: tuple[tuple[int, ...], ...]) -> Topology:
        own = dist.get_rank()
        for node, members in enumerate(ranks):
            if own in members:
                return Topology(ranks, node, members.index(own))
        raise UnsupportedError("the mesh", f"it has no rank {own}", "call DASO on the ranks that are in the mesh")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.ranks)

    @property
    def places(self) -> int:
        """Number of ranks in each node."""
        return len(self.ranks[0])

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.ranks[self.node][self.place]

    @property
    def is_first(self) -> bool:
        """Whether this is the rank whose weights all others start with."""
        return self.rank == self.ranks[0][0]

    def rank_at(self, place: int) -> int:
        """Return the global rank of a place in this node."""
        return self.ranks[self.node][place]


class Groups:
    """The process groups of one rank; None for one that would have a single member.

    Args:
        topology: The nodes and their ranks.
        device: Device of the tensors that are sent.
        mesh: The user's, whose own groups connect ranks that are not all of the job.
        timeout: Timeout of messages between nodes.
        node_timeout: Timeout of messages inside a node, and of those to all ranks.

    Attributes:
        everyone: All ranks; for the start and for loading, before any rank can be lost.
        node: The ranks of this node, for tensors.
        control: The same ranks, for small messages in host memory: reading them does not wait for a GPU.
        across: The ranks with this place in every node that is alive.
    """

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        mesh: DeviceMesh | None = None,
        *,
        timeout: timedelta,
        node_timeout: timedelta,
    ) -> None:
        self._topology = topology
        self._timeout = timeout
        self._backend = "gloo" if device.type == "cpu" else None
        everyone = tuple(rank for members in topology.ranks for rank in members)
        self._made_by_all = len(everyone) > 1 and len(everyone) == dist.get_world_size()
        self._made: list[ProcessGroup] = []
        self.everyone: ProcessGroup | None = None
        self.node: ProcessGroup | None = None
        self.control: ProcessGroup | None = None
        self.across: ProcessGroup | None = None
        if mesh is not None and len(everyone) > 1 and not self._made_by_all:
            check_group_counts([mesh.get_group(dimension) for dimension in DIMENSIONS], technique="DASO")
        try:
            if len(everyone) > 1:
                self.everyone = self._new([everyone], node_timeout)
            if topology.places > 1:
                self.node = self._new(topology.ranks, node_timeout)
                self.control = self.node
                if self._backend is None and dist.get_backend(self.node) != "gloo":
                    self.control = self._new(topology.ranks, node_timeout, backend="gloo")
            if topology.nodes > 1:
                self.across = self._new(list(zip(*topology.ranks, strict=True)), timeout)
        except BaseException:
            self.close()
            raise

    def regroup(self, nodes: Sequence[int]) -> None:
        """Make a new group between the nodes that are alive; only their ranks take part."""
        self.across = None
        # Lost ranks cannot take part in making a group.
        self._made_by_all = False
        if len(nodes) > 1:
            self.across = self._new(
                [[self._topology.ranks[node][self._topology.place] for node in nodes]], self._timeout
            )

    def close(self) -> None:
        """End the groups, after waiting for what is under way in them.

        While there is one that only its members have made, all stay: see :func:`end_group`.
        """
        self.everyone = self.node = self.control = self.across = None
        while self._made:
            end_group(self._made.pop())

    def _new(self, families: Sequence[Sequence[int]], timeout: timedelta, backend: str | None = None) -> ProcessGroup:
        """Make groups that do not overlap; return this rank's."""
        backend = backend or self._backend
        own = new_group(families, made_by_all=self._made_by_all, timeout=timeout, backend=backend)
        self._made.append(own)
        return own
