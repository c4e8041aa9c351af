"""Links between devices, and the cost of a message."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from gradweave.errors import ArgumentError
from gradweave.schedule.tasks import Demand

_LINK = re.compile(r"(?P<rate>[\d.]+(?:e[+-]?\d+)?)\s*(?P<unit>[kMGT]?i?)(?P<size>bit|B|b)/s", re.ASCII)
_LATENCY = re.compile(r"(?P<time>[\d.]+(?:e[+-]?\d+)?)\s*(?P<unit>s|ms|us|ns)", re.ASCII)
_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, slots=True)
class Link:
    """A link of ``bandwidth`` bytes per second that adds ``latency`` seconds to each message.

    A message occupies the link for its latency too, so that many small messages cost more than one large one, as they
    do on real networks.

    Attributes:
        bandwidth: Bytes per second.
        latency: Seconds per message.
        device_seconds: Seconds per byte of the device itself, which has less left for computing meanwhile: on a CPU,
            messages are sent, received and summed by the same cores.
    """

    bandwidth: float = math.inf
    latency: float = 0.0
    device_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ArgumentError("bandwidth", self.bandwidth, "give a positive number of bytes per second")
        if not 0 <= self.latency < math.inf:
            raise ArgumentError("latency", self.latency, "give seconds, zero or more")
        if not 0 <= self.device_seconds < math.inf:
            raise ArgumentError("device_seconds", self.device_seconds, "give seconds per byte, zero or more")

    @property
    def free(self) -> bool:
        """Whether every message takes no time at all."""
        return math.isinf(self.bandwidth) and self.latency == 0

    def transfer_seconds(self, size: int) -> float:
        """Return the duration of sending ``size`` bytes to one peer."""
        return self.latency + size / self.bandwidth

    def all_reduce_seconds(self, size: int, ranks: int) -> float:
        """Return the duration of an all-reduce of ``size`` bytes among ``ranks`` peers.

        The bandwidth term is that of a ring, 2(n-1)/n of the data over each peer's link; the latency term is that of a
        tree, twice its depth. Collective libraries choose between the two by size.
        """
        if ranks < 2:
            return 0.0
        return 2 * math.ceil(math.log2(ranks)) * self.latency + 2 * (ranks - 1) / ranks * size / self.bandwidth

    def all_reduce_demand(self, size: int, ranks: int) -> Demand:
        """Return the shares of the device that an all-reduce takes while it lasts."""
        seconds = self.all_reduce_seconds(size, ranks)
        share = min(1.0, self.device_seconds * size / seconds) if seconds else 0.0
        return Demand(share, share)

    @staticmethod
    def parse(text: str) -> Link:
        """Parse ``"25Gbit/s"``, ``"25Gbit/s,10us"`` (with latency), ``"3GB/s"`` or ``"free"``."""
        if text.strip() == "free":
            return Link()
        rate_text, _, latency_text = text.partition(",")
        rate = _LINK.fullmatch(rate_text.strip())
        latency = _LATENCY.fullmatch(latency_text.strip()) if latency_text else None
        try:
            if rate is None or (latency_text and latency is None):
                raise ValueError
            bits = 8.0 if rate["size"] != "B" else 1.0
            bandwidth = float(rate["rate"]) * _PREFIX[rate["unit"]] / bits
            seconds = float(latency["time"]) * _SECONDS[latency["unit"]] if latency else 0.0
            return Link(bandwidth, seconds)
        except (ValueError, KeyError):
            remedy = 'write a positive rate and, after a comma, a latency: "25Gbit/s", "3GB/s,10us"; or "free"'
            raise ArgumentError("link", text, remedy) from None


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a graph and the links between them.

    Attributes:
        devices: Number of devices: pipeline stages, or data-parallel replicas over all nodes.
        link: Link between devices; between nodes if there are several.
        nodes: Number of nodes, each with equally many devices.
        local_link: Link between the devices of one node.
    """

    devices: int = 1
    link: Link = Link()
    nodes: int = 1
    local_link: Link = Link()

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ArgumentError("devices", self.devices, "give at least 1")
        if self.nodes < 1 or self.devices % self.nodes:
            raise ArgumentError("nodes", self.nodes, f"give a divisor of the {self.devices} devices")

    @property
    def local_ranks(self) -> int:
        """Devices per node."""
        return self.devices // self.nodes
