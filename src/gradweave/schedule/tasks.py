"""The five kinds of task that a training step is made of, and the bytes they hold."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The work that a task does for its layer."""

    F = "F"
    """Forward."""
    X = "X"
    """Input gradient: the part of backward that the layer below waits for."""
    W = "W"
    """Weight gradient: the part of backward that nothing in backward waits for."""
    C = "C"
    """Communication between devices."""
    U = "U"
    """Update of the layer's weights."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The shares of a device that a task takes while it runs alone, each between 0 and 1.

    Two tasks run side by side at full speed while their shares sum to at most 1, and slow down together beyond that.
    The default, all of the device, makes running side by side worthless: no schedule should count on an overlap that
    has not been measured.
    """

    compute: float = 1.0
    memory: float = 1.0


FULL_DEMAND = Demand()


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work of one layer.

    Attributes:
        kind: The kind of work.
        layer: Index of the layer, 0 nearest the input.
        seconds: Duration when nothing runs beside it.
        resource: The device it runs on, or the link that carries it. Empty in a pipeline's graph until a policy has
            placed its layers.
        microbatch: Index of the micro-batch (0 for updates and collectives).
        step: Index of the training step.
        layers: Number of consecutive layers it covers, from ``layer`` upwards.
        demand: Shares of its device that it takes.
        payload: Bytes sent to each consumer on another device; for a collective, the bytes that are reduced.
        note: Distinguishes it from tasks of the same kind and layer, in labels.
    """

    kind: Kind
    layer: int
    seconds: float
    resource: str = ""
    microbatch: int = 0
    step: int = 0
    layers: int = 1
    demand: Demand = FULL_DEMAND
    payload: int = 0
    note: str = ""

    @property
    def label(self) -> str:
        """Short unambiguous name, for pictures and error messages."""
        layers = f"{self.layer}" if self.layers == 1 else f"{self.layer}-{self.layer + self.layers - 1}"
        note = f" {self.note}" if self.note else ""
        return f"{self.kind}(layer {layers}, micro-batch {self.microbatch}, step {self.step}{note})"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that live on a device from the start of its first user to the end of its last.

    A layer's input lives from F until W, its output gradient from the X of the layer above until its own X and W, its
    weight gradient from W until U.
    """

    size: int
    device: str
    users: tuple[int, ...]
