"""Two network namespaces with a link of a given rate between them: two nodes on one machine. Needs root.

Ranks of one namespace talk over its loopback, unshaped; those of different ones over the link.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

ADDRESSES = ("10.231.0.1", "10.231.0.2")


class CannotShapeError(Exception):
    """This machine does not let us make namespaces, or shape a link."""


class Link:
    """Two nodes and what joins them, for the length of a ``with``."""

    def __init__(self, megabits: float) -> None:
        self.megabits = megabits
        self.address = ADDRESSES[0]
        self.names = tuple(f"gw{os.getpid() % 10_000}n{node}" for node in range(2))

    def __enter__(self) -> Link:
        left, right = self.names
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            _run("ip", "link", "add", left, "netns", left, "type", "veth", "peer", "name", right, "netns", right)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                self._inside(name, "ip", "addr", "add", f"{address}/24", "dev", name)
                for device in ("lo", name):
                    self._inside(name, "ip", "link", "set", device, "up")
            self.shape(self.megabits)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            self.__exit__(None, None, None)
            raise CannotShapeError(str(error)) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def shape(self, megabits: float) -> None:
        """Sets the rate in both directions."""
        self.megabits = megabits
        for name in self.names:
            self._inside(
                name, "tc", "qdisc", "replace", "dev", name, "root", "tbf",
                "rate", f"{megabits:.3f}mbit", "burst", "256kb", "latency", "400ms",
            )  # fmt: skip

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._inside(self.names[0], "ip", "link", "set", self.names[0], "down")

    def restore(self) -> None:
        """Undoes :meth:`cut`."""
        self._inside(self.names[0], "ip", "link", "set", self.names[0], "up")

    def sent_bytes(self, node: int) -> int:
        """What a node has sent over the link so far, headers included."""
        path = f"/sys/class/net/{self.names[node]}/statistics/tx_bytes"
        return int(self._inside(self.names[node], "cat", path))

    def start(self, node: int, command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """A process on a node, to be spoken with over its standard input and output."""
        variables = {"GLOO_SOCKET_IFNAME": self.names[node], "MASTER_ADDR": ADDRESSES[0], "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[node], sys.executable, *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **variables, **environment},
        )  # fmt: skip

    def _inside(self, name: str, *command: str) -> str:
        return _run("ip", "netns", "exec", name, *command)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    with Link(100.0) as made:
        print("namespaces and shaped links work here:", made.names, Path("/sys/class/net").exists())
