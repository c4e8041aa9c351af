"""Costs of a network's layers in seconds and bytes, from a file, a formula or the caller."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gradweave.errors import ArgumentError
from gradweave.schedule.tasks import FULL_DEMAND, Demand

_SECONDS = ("forward", "input_grad", "weight_grad", "update")
_BYTES = ("input_bytes", "output_bytes", "parameter_bytes")
_LARGEST = 1e15
_DEMANDS = ("forward_demand", "input_grad_demand", "weight_grad_demand", "update_demand")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer with weights, for one micro-batch.

    Attributes:
        name: The layer's name.
        forward: Seconds of F.
        input_grad: Seconds of X.
        weight_grad: Seconds of W.
        update: Seconds of U.
        input_bytes: Size of its input, kept from F until W and sent between pipeline stages.
        output_bytes: Size of its output, and so of its output gradient.
        parameter_bytes: Size of its weight gradient: held until U, and reduced between replicas.
        block: Name of its block. Layers of one block are neighbours with similar kernels; policies that reason about
            regions of the step treat a block as one.
        forward_demand: Shares of the device that F takes.
        input_grad_demand: Shares of the device that X takes.
        weight_grad_demand: Shares of the device that W takes.
        update_demand: Shares of the device that U takes.
    """

    name: str
    forward: float
    input_grad: float
    weight_grad: float
    update: float = 0.0
    input_bytes: int = 0
    output_bytes: int = 0
    parameter_bytes: int = 0
    block: str = ""
    forward_demand: Demand = FULL_DEMAND
    input_grad_demand: Demand = FULL_DEMAND
    weight_grad_demand: Demand = FULL_DEMAND
    update_demand: Demand = FULL_DEMAND

    def __post_init__(self) -> None:
        for key in (*_SECONDS, *_BYTES):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LARGEST:
                # An integer beyond float's range cannot be formatted as one.
                shown = float("inf") if isinstance(value, int) and value >= _LARGEST else value
                remedy = f"give a number, zero or more, and less than {_LARGEST:g}"
                raise ArgumentError(f"layer {self.name!r}, {key}", shown, remedy)
            if key in _BYTES and value != int(value):
                raise ArgumentError(f"layer {self.name!r}, {key}", value, "give whole bytes")
        for key in _DEMANDS:
            demand = getattr(self, key)
            if not (0 <= demand.compute <= 1 and 0 <= demand.memory <= 1):
                raise ArgumentError(f"layer {self.name!r}, {key}", demand, "give shares between 0 and 1")


@dataclass(frozen=True, slots=True)
class Costs:
    """A network as the scheduler sees it.

    Attributes:
        layers: Costs of its layers, input side first.
        name: The network's name, for titles.
        source: Origin of the costs, for reports.
    """

    layers: tuple[LayerCost, ...]
    name: str = "network"
    source: str = field(default="caller", compare=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ArgumentError("layers", [], "give at least one layer")

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all weight gradients together."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def compute_seconds(self) -> float:
        """Seconds of F, X, W and U of all layers, for one micro-batch."""
        return sum(sum(getattr(layer, key) for key in _SECONDS) for layer in self.layers)

    def save(self, path: str | Path) -> None:
        """Write the cost file that :meth:`load` reads."""
        layers = []
        for layer in self.layers:
            row = asdict(layer)
            for key in _DEMANDS:
                if getattr(layer, key) == FULL_DEMAND:
                    del row[key]
            layers.append(row)
        Path(path).write_text(json.dumps({"name": self.name, "layers": layers}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """Read a cost file: ``{"name": ..., "layers": [{"name": ..., "forward": ...}, ...]}``."""
        path = Path(path)
        try:
            data = json.loads(path.read_text())
        except OSError as error:
            raise ArgumentError("cost file", str(path), f"cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ArgumentError("cost file", str(path), f"is not valid JSON: {error}") from None
        if not isinstance(data, dict) or not isinstance(data.get("layers"), list):
            raise ArgumentError("cost file", str(path), 'write one object with a list under "layers"')
        unknown = sorted(data.keys() - {"name", "layers"})
        if unknown:
            raise ArgumentError(f"{path}, key", unknown[0], "is unknown; the file has a name and layers")
        layers = tuple(_layer(row, f"{path}, layer {i}") for i, row in enumerate(data["layers"]))
        return cls(layers, name=str(data.get("name", path.stem)), source=str(path))

    @classmethod
    def uniform(cls, layers: int) -> Costs:
        """Return layers with one second for each of F, X and W, a free update, and one byte of each size."""
        if layers < 1:
            raise ArgumentError("layers", layers, "give at least 1")
        unit = [
            LayerCost(f"layer{i}", 1.0, 1.0, 1.0, input_bytes=1, output_bytes=1, parameter_bytes=1)
            for i in range(layers)
        ]
        return cls(tuple(unit), name="uniform")


def _layer(row: Any, where: str) -> LayerCost:
    """Return one layer of a cost file; ``where`` names it in errors."""
    known = {f.name for f in fields(LayerCost)}
    if not isinstance(row, dict):
        raise ArgumentError(where, row, "write an object")
    unknown = sorted(row.keys() - known)
    if unknown:
        raise ArgumentError(f"{where}, key", unknown[0], f"use one of {', '.join(sorted(known))}")
    missing = sorted({"forward", "input_grad", "weight_grad"} - row.keys())
    if missing:
        raise ArgumentError(f"{where}, key", missing[0], "is missing: give its seconds")
    values = {"name": where, **row}
    for key in _DEMANDS:
        if key in row:
            try:
                values[key] = Demand(**{share: float(value) for share, value in dict(row[key]).items()})
            except (TypeError, ValueError):
                raise ArgumentError(f"{where}, {key}", row[key], 'write {"compute": 0.5, "memory": 1.0}') from None
    return LayerCost(**values)
