"""A step in Triton kernels, each for many tensors: two passes over gradients and momentum, and nothing waits.

The first pass takes the norms and the products with vectors that scales need; the second one makes the direction
and writes momentum and weight. Between them lie a few launches on numbers and vectors. Tables of shapes are
made once; addresses travel as arguments of a kernel, and only where they are others than in the last step. While a
CUDA graph is captured they go to a table of the graph's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from gradweave._logging import announce
from gradweave.optim.kernels.addresses import Addresses
from gradweave.optim.kernels.step_inputs import (
    Unsuitable,
    addresses_of,
    flat_shape,
    gradients_are_plain,
    groups_of,
    layer_shape,
)
from gradweave.optim.kernels.step_tables import Blocks, FlatShape, LayerShape, Segment, Tables, make_tables
from gradweave.optim.rules import INPUTS, LEADING, LEAST, ROW, Number, UpdateRule
from gradweave.optim.state import SGD, ParameterGroup, ParameterInGroup, learning_rate

if TYPE_CHECKING:
    from gradweave.optim.base import Layer

BLOCKS = Blocks()
_ROOM = 64
_OLDEST = (7, 0)
_MOST_PLANS = 16
"""How many sets of shapes are remembered besides those that a graph was captured with."""


def has_kernels(device: torch.device) -> bool:
    """Whether kernels can be launched for a device."""
    return device.type == "cuda" and _compiles_for(device)


@cache
def _compiles_for(device: torch.device) -> bool:
    """Whether there is a Triton, and it knows the device."""
    if find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= _OLDEST:
        return True
    announce(f"optim: no kernels of our own on {device}, since there is no Triton for it")
    return False


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched for a device goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_fusible(rule: UpdateRule) -> bool:
    """Whether the kernels know a rule: our own, whose scales are each row's, with vectors known before the gradient."""
    plain = rule.relative and rule.decoupled and rule.momentum_first and not rule.divided and not rule.nesterov_twice
    return plain and rule.trust == ROW and rule.formula in (INPUTS, LEADING)


@dataclass
class _Plan:
    """The tables of one set of shapes, and the addresses that were last written for it.

    Attributes:
        tables: The tables.
        addresses: By name.
        one: A one on the device.
        is_in_graph: Whether a captured graph reads the tables.
    """

    tables: Tables
    addresses: dict[str, Addresses]
    one: torch.Tensor
    is_in_graph: bool = False


class FusedStep:
    """The kernels' part of an optimizer: plans by shapes.

    Args:
        optimizer: The one it belongs to; copies of that have none.
    """

    def __init__(self, optimizer: Any) -> None:
        self.plans: dict[Any, _Plan] = {}
        self._owner = ref(optimizer)
        self._last: tuple[Any, _Plan] | None = None

    def take(self, optimizer: Any, layers: list[Layer], others: list[ParameterInGroup]) -> bool:
        """Takes a step whose state is prepared; False if that must be done in another way."""
        device = (layers[0].weight if layers else others[0][0]).device
        mine = self._owner() is optimizer
        if not mine or not layers or not has_kernels(device) or torch.compiler.is_compiling():
            return False
        if any(layer.group["foreach"] is not None for layer in layers):
            return False
        capturing = is_capturing(device)
        try:
            groups = groups_of(layers, others, device)
            addresses = addresses_of(optimizer, layers, others)
            plan = self._plan(optimizer, groups, layers, others, addresses, device, capturing=capturing)
        except Unsuitable as reason:
            announce(f"optim: no kernels of our own for this step, since {reason}")
            return False
        optimizer.begin_step()
        with on_device(device):
            _Step(optimizer, plan, list(groups.values()), layers, others, addresses, capturing=capturing).take()
        return True

    def _plan(
        self,
        optimizer: Any,
        groups: dict[int, ParameterGroup],
        layers: list[Layer],
        others: list[ParameterInGroup],
        addresses: dict[str, list[int]],
        device: torch.device,
        *,
        capturing: bool,
    ) -> _Plan:
        """The tables for a step: the last one's, if nothing has moved but gradients, or those of its shapes."""
        members = [id(layer.group) for layer in layers], [id(group) for _, group in others]
        now = (members, addresses["fixed"], addresses["flat_fixed"], device, BLOCKS)
        if self._last is not None and self._last[0] == now and gradients_are_plain(layers, others, addresses):
            plan = self._last[1]
        else:
            shapes = [layer_shape(layer, groups, device) for layer in layers]
            flats = [flat_shape(p, group, optimizer.state[p], groups, device) for p, group in others]
            plan = self._plan_of(shapes, flats, device, capturing=capturing)
            are_aligned = all(shape.aligned for shape in shapes) and all(flat.aligned for flat in flats)
            self._last = (now, plan) if are_aligned else None
        plan.is_in_graph = plan.is_in_graph or capturing
        return plan

    def _plan_of(
        self, shapes: list[LayerShape], flats: list[FlatShape], device: torch.device, *, capturing: bool
    ) -> _Plan:
        key = (tuple(shapes), tuple(flats), device, BLOCKS)
        plan = self.plans.get(key)
        if plan is None:
            if capturing:
                raise Unsuitable("a CUDA graph is being captured before a step like this one has run")
            tables = make_tables(shapes, flats, BLOCKS, device)
            sizes = {"fixed": 8 * len(shapes), "gradients": 2 * len(shapes)}
            sizes |= {"flat_fixed": 4 * len(flats), "flat_gradients": len(flats)}
            addresses = {name: Addresses(size, device) for name, size in sizes.items()}
            self._forget()
            plan = self.plans[key] = _Plan(tables, addresses, torch.ones(1, dtype=torch.float32, device=device))
        return plan

    def _forget(self) -> None:
        """Makes room for a plan: the oldest goes that no graph needs."""
        old = [key for key, plan in self.plans.items() if not plan.is_in_graph]
        if len(old) >= _MOST_PLANS:
            del self.plans[old[0]]


class _Step:
    """One step: addresses, room, and launches."""

    def __init__(
        self,
        optimizer: Any,
        plan: _Plan,
        groups: list[ParameterGroup],
        layers: list[Layer],
        others: list[ParameterInGroup],
        addresses: dict[str, list[int]],
        *,
        capturing: bool,
    ) -> None:
        self.optimizer = optimizer
        self.plan = plan
        self.groups = groups
        self.layers = layers
        self.others = others
        self.kernels = import_module("gradweave.optim.kernels.step_triton")
        self.vector_kernels = import_module("gradweave.optim.kernels.vectors_triton")
        self.flat_kernels = import_module("gradweave.optim.kernels.first_order_triton")
        tables = plan.tables
        counts = tables.count_of
        room = {
            "vectors": tables.elements,
            "block_sums": 8 * counts["blocks"],
            "matrix_numbers": 8 * counts["matrices"],
            "layer_numbers": 8 * counts["layers"],
        }
        padded = [-(-max(size, 1) // _ROOM) * _ROOM for size in room.values()]
        parts = torch.empty(sum(padded), dtype=torch.float32, device=plan.one.device).split(padded)
        self.room = dict(zip(room, parts, strict=True))
        self.at = {
            name: plan.addresses[name].holding(
                values, self.flat_kernels, capturing=capturing, moves=name.endswith("gradients")
            )
            for name, values in addresses.items()
        }

    def take(self) -> None:
        """All launches of the step."""
        counts = self.plan.tables.count_of
        first_chunk = -(-counts["layers"] // _ROOM) * _ROOM
        squares = torch.zeros(first_chunk + counts["chunks"], dtype=torch.float32, device=self.plan.one.device)
        inverse = self.optimizer.inverse_loss_scale(self.plan.one.device)
        scale = inverse.to(torch.float32).view(1) if isinstance(inverse, torch.Tensor) else self.plan.one
        self._make_vectors()
        self._measure(scale, squares, squares[first_chunk:])
        keep = self.optimizer.may_step([squares.to(torch.float64).sum()])
        taken = keep.to(torch.int32).view(1)
        self._write(scale, taken)
        if self.others:
            self._update_others(taken, scale)
        torch.autograd.graph.increment_version(list(self._written()))

    def _make_vectors(self) -> None:
        """The vectors that layers will have if the step is taken."""
        kernels, tables, room, at = self.vector_kernels, self.plan.tables, self.room, self.at
        kernels.look[(len(self.layers),)](tables.layers, at["fixed"], room["layer_numbers"], BLOCKS.long, num_warps=8)
        for member, (first, count) in tables.matrices_of.items():
            group = self.groups[member]
            kernels.blend[(count,)](
                tables.matrices, at["fixed"], room["layer_numbers"], room["matrix_numbers"], room["vectors"],
                float(group["running_average"]), first, BLOCKS.long, num_warps=8,
            )  # fmt: skip

    def _measure(self, scale: torch.Tensor, squares: torch.Tensor, chunk_squares: torch.Tensor) -> None:
        """The first pass over gradients: squares, and layers' scales."""
        kernels, tables, room, at = self.kernels, self.plan.tables, self.room, self.at
        for part in tables.tile_segments:
            group = self.groups[part.member]
            kernels.measure[(part.count,)](
                tables.tiles, tables.matrices, at["fixed"], at["gradients"], room["vectors"], scale,
                float(group["momentum"]), _sign(group), part.first, tables.with_left, part.aligned, part.rows,
                part.columns, num_warps=8,
            )  # fmt: skip
        for member, (first, count) in tables.blocks_of.items():
            group = self.groups[member]
            kernels.gather[(count,)](
                tables.blocks, tables.matrices, at["fixed"], at["gradients"], room["vectors"], room["block_sums"],
                scale, float(group["momentum"]), _sign(group), first, tables.with_left, BLOCKS.parts, BLOCKS.vector,
            )  # fmt: skip
        for member, (first, count) in tables.matrices_of.items():
            on_inputs, on_outputs = self.groups[member]["damping"], self.groups[member]["output_damping"]
            kernels.combine[(count,)](
                tables.matrices, room["block_sums"], room["matrix_numbers"], float(on_inputs),
                float(on_inputs if on_outputs is None else on_outputs), first, BLOCKS.vector,
            )  # fmt: skip
        kernels.settle[(len(self.layers),)](
            tables.layers,
            tables.matrices,
            at["fixed"],
            room["matrix_numbers"],
            room["layer_numbers"],
            squares,
            BLOCKS.vector,
        )
        for part in tables.chunk_segments:
            self.flat_kernels.measure_flat[(part.count,)](
                tables.chunks, at["flat_gradients"], chunk_squares, scale, part.first, part.aligned, BLOCKS.flat
            )

    def _write(self, scale: torch.Tensor, taken: torch.Tensor) -> None:
        """The second pass over gradients: momentum and weights, and then vectors."""
        kernels, tables, room, at = self.kernels, self.plan.tables, self.room, self.at
        for part in tables.tile_segments:
            group = self.groups[part.member]
            rate, is_tensor = _rate(group)
            kernels.apply[(part.count,)](
                tables.tiles, tables.matrices, at["fixed"], at["gradients"], room["vectors"], room["matrix_numbers"],
                room["layer_numbers"], taken, scale, rate, float(group["momentum"]), float(group["weight_decay"]),
                _sign(group), LEAST, part.first, tables.with_left, is_tensor, part.aligned, BLOCKS.most * part.rows,
                part.rows, part.columns, num_warps=8,
            )  # fmt: skip
        self.vector_kernels.commit[(tables.count_of["matrices"],)](
            tables.layers, tables.matrices, at["fixed"], room["vectors"], taken, BLOCKS.long, num_warps=8
        )

    def _update_others(self, taken: torch.Tensor, scale: torch.Tensor) -> None:
        count = len(self.others)
        self.flat_kernels.count_steps[-(-count // BLOCKS.vector),](self.at["flat_fixed"], taken, count, BLOCKS.vector)
        for part in self.plan.tables.chunk_segments:
            self._launch_flat(part, taken, scale)

    def _launch_flat(self, part: Segment, taken: torch.Tensor, scale: torch.Tensor) -> None:
        group, at, chunks = self.groups[part.member], self.at, self.plan.tables.chunks
        rate, is_tensor = _rate(group)
        decay, sign = float(group["weight_decay"]), _sign(group)
        if group["rule"] == SGD:
            self.flat_kernels.apply_sgd[(part.count,)](
                chunks, at["flat_fixed"], at["flat_gradients"], taken, scale, rate, float(group["momentum"]), decay,
                sign, part.first, is_tensor, part.aligned, BLOCKS.flat,
            )  # fmt: skip
            return
        beta1, beta2 = map(float, group["betas"])
        self.flat_kernels.apply_adamw[(part.count,)](
            chunks, at["flat_fixed"], at["flat_gradients"], taken, scale, rate, beta1, 1 - beta1, _log(beta1), beta2,
            1 - beta2, _log(beta2), float(group["eps"]), decay, sign, part.first, is_tensor, part.aligned, BLOCKS.flat,
        )  # fmt: skip

    def _written(self) -> Iterable[torch.Tensor]:
        for layer in self.layers:
            yield layer.weight
            if layer.bias is not None:
                yield layer.bias
        for p, _ in self.others:
            yield p


def _rate(group: ParameterGroup) -> tuple[Number, bool]:
    lr = learning_rate(group)
    return (lr, True) if isinstance(lr, torch.Tensor) else (float(lr), False)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _sign(group: ParameterGroup) -> float:
    return -1.0 if group["maximize"] else 1.0


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which kernels are launched for a device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
