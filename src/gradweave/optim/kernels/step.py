"""Eva's and Eva-f's step in Triton kernels, each for many tensors: two passes over gradients and momentum.

The first pass takes the norms, and the products with vectors, that scales need; the second one makes the direction and
writes momentum and weights. Between them lie a few launches on numbers and vectors. The host does not wait for the
device. Tables of shapes are made once; addresses are written only where they differ from the last step's, and into a
table of the graph's own while a CUDA graph is captured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from gradweave._logging import announce
from gradweave.optim.kernels.launch import (
    VECTORIZED_BYTES,
    AddressTable,
    has_kernels,
    is_capturing,
    on_device,
    triton_module,
)
from gradweave.optim.kernels.step_tables import (
    BlockSizes,
    BlockSums,
    ChunkLaunch,
    FirstOrderShape,
    FirstOrderTensors,
    GradientTensors,
    LayerNumbers,
    LayerShape,
    LayerTensors,
    MatrixNumbers,
    StepTables,
    make_tables,
)
from gradweave.optim.rules import INPUTS, LEADING, LEAST, ROW, Number, UpdateRule
from gradweave.optim.state import SGD, ParameterGroup, ParameterInGroup, ParameterState, learning_rate

if TYPE_CHECKING:
    from gradweave.optim.base import Layer, VectorOptimizer

BLOCK_SIZES = BlockSizes()
_SCRATCH_ALIGNMENT = 64
"""Elements at whose multiples scratch buffers begin: 256 bytes."""
_MAX_PLANS = 16
"""Number of sets of shapes that are remembered, besides those that a graph was captured with."""


def is_fusible(rule: UpdateRule) -> bool:
    """Return whether kernels know a rule: our own, with a scale for each row, and vectors known before the gradient."""
    is_ours = rule.relative and rule.decoupled and rule.momentum_first and not rule.divided and not rule.nesterov_twice
    return is_ours and rule.trust == ROW and rule.formula in (INPUTS, LEADING)


class UnsupportedStepError(Exception):
    """Kernels do not support a step, which torch's operations then take; the message is the reason."""


class FusedStep:
    """The steps of one optimizer in kernels.

    Args:
        optimizer: The optimizer; a copy of it, which a copy of this comes with, takes its steps without kernels.

    Attributes:
        plans: Tables and address tables, by sets of shapes.
    """

    def __init__(self, optimizer: VectorOptimizer) -> None:
        self.plans: dict[Any, _Plan] = {}
        self._owner = ref(optimizer)
        self._last: tuple[Any, _Plan] | None = None

    def take(self, optimizer: VectorOptimizer, layers: list[Layer], others: list[ParameterInGroup]) -> bool:
        """Take a step whose state is prepared; return False, with nothing changed, if kernels do not support it.

        Args:
            optimizer: The optimizer that steps.
            layers: Weights with vectors.
            others: Parameters without vectors, and their groups.
        """
        device = (layers[0].weight if layers else others[0][0]).device
        is_owner = self._owner() is optimizer
        if not is_owner or not layers or not has_kernels(device) or torch.compiler.is_compiling():
            return False
        if any(layer.group["foreach"] is not None for layer in layers):
            return False
        capturing = is_capturing(device)
        try:
            groups = _groups_of(layers, others, device)
            addresses = _addresses_of(optimizer, layers, others)
            plan = self._plan(optimizer, groups, layers, others, addresses, device, capturing=capturing)
        except UnsupportedStepError as reason:
            announce(f"optim: no kernels of our own for this step, since {reason}")
            return False
        optimizer.begin_step()
        with on_device(device):
            _Launches(optimizer, plan, list(groups.values()), layers, others, addresses, capturing=capturing).run()
        return True

    def _plan(
        self,
        optimizer: VectorOptimizer,
        groups: dict[int, ParameterGroup],
        layers: list[Layer],
        others: list[ParameterInGroup],
        addresses: _Addresses,
        device: torch.device,
        *,
        capturing: bool,
    ) -> _Plan:
        """Return the plan for a step: the last step's if only gradients have moved, or the one for its shapes."""
        members = [id(layer.group) for layer in layers], [id(group) for _, group in others]
        key = (members, addresses.layers, addresses.first_order, device, BLOCK_SIZES)
        if self._last is not None and self._last[0] == key and _gradients_are_plain(layers, others, addresses):
            plan = self._last[1]
        else:
            shapes = [_layer_shape(layer, groups, device) for layer in layers]
            flats = [_first_order_shape(p, group, optimizer.state[p], groups, device) for p, group in others]
            plan = self._plan_of(shapes, flats, device, capturing=capturing)
            are_aligned = all(shape.is_aligned for shape in shapes) and all(flat.is_aligned for flat in flats)
            self._last = (key, plan) if are_aligned else None
        plan.is_in_graph = plan.is_in_graph or capturing
        return plan

    def _plan_of(
        self, shapes: list[LayerShape], flats: list[FirstOrderShape], device: torch.device, *, capturing: bool
    ) -> _Plan:
        key = (tuple(shapes), tuple(flats), device, BLOCK_SIZES)
        plan = self.plans.get(key)
        if plan is None:
            if capturing:  # copying tables to the device is not allowed then
                raise UnsupportedStepError("a CUDA graph is being captured before a step like this one has run")
            plan = _Plan(
                tables=make_tables(shapes, flats, BLOCK_SIZES, device),
                layers=AddressTable(len(LayerTensors._fields) * len(shapes), device),
                gradients=AddressTable(len(GradientTensors._fields) * len(shapes), device),
                first_order=AddressTable(len(FirstOrderTensors._fields) * len(flats), device),
                first_order_gradients=AddressTable(len(flats), device),
                one=torch.ones(1, dtype=torch.float32, device=device),
            )
            self._make_room()
            self.plans[key] = plan
        return plan

    def _make_room(self) -> None:
        """Drop the oldest plan that no graph needs, if there are as many as are remembered."""
        eager = [key for key, plan in self.plans.items() if not plan.is_in_graph]
        if len(eager) >= _MAX_PLANS:
            del self.plans[eager[0]]


@dataclass
class _Plan:
    """Tables on the device for one set of shapes.

    Attributes:
        tables: The tables of shapes.
        layers: Addresses of layers' weights and states.
        gradients: Addresses of layers' gradients.
        first_order: Addresses of parameters without vectors, and of their states.
        first_order_gradients: Addresses of their gradients.
        one: The number one, as an inverse loss scale.
        is_in_graph: Whether a captured graph reads the tables.
    """

    tables: StepTables
    layers: AddressTable
    gradients: AddressTable
    first_order: AddressTable
    first_order_gradients: AddressTable
    one: torch.Tensor
    is_in_graph: bool = False


class _Addresses(NamedTuple):
    """Device addresses of all tensors in a step."""

    layers: list[int]
    gradients: list[int]
    first_order: list[int]
    first_order_gradients: list[int]


class _Launches:
    """The launches of one step, and their scratch memory."""

    def __init__(
        self,
        optimizer: VectorOptimizer,
        plan: _Plan,
        groups: list[ParameterGroup],
        layers: list[Layer],
        others: list[ParameterInGroup],
        addresses: _Addresses,
        *,
        capturing: bool,
    ) -> None:
        self._optimizer = optimizer
        self._tables = plan.tables
        self._groups = groups
        self._layers = layers
        self._others = others
        self._one = plan.one
        self._kernels = triton_module("step_triton")
        self._first_order_kernels = triton_module("first_order_triton")
        counts = plan.tables.counts
        self._vectors, self._block_sums, self._matrix_numbers, self._layer_numbers = _scratch(
            plan.one.device,
            plan.tables.vector_elements,
            len(BlockSums._fields) * counts["blocks"],
            len(MatrixNumbers._fields) * counts["matrices"],
            len(LayerNumbers._fields) * counts["layers"],
        )
        self._at = plan.layers.write(addresses.layers, capturing=capturing, changes_each_step=False)
        self._gradients_at = plan.gradients.write(addresses.gradients, capturing=capturing, changes_each_step=True)
        self._first_order_at = plan.first_order.write(
            addresses.first_order, capturing=capturing, changes_each_step=False
        )
        self._first_order_gradients_at = plan.first_order_gradients.write(
            addresses.first_order_gradients, capturing=capturing, changes_each_step=True
        )

    def run(self) -> None:
        """Launch all kernels of the step."""
        counts, device = self._tables.counts, self._one.device
        # Squares of layers, followed by those of chunks: one tensor, whose sum says whether all gradients are finite.
        first_chunk = -(-counts["layers"] // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
        squares = torch.zeros(first_chunk + counts["chunks"], dtype=torch.float32, device=device)
        inverse = self._optimizer.inverse_loss_scale(device)
        inverse_scale = inverse.to(torch.float32).view(1) if isinstance(inverse, torch.Tensor) else self._one
        self._make_vectors()
        self._measure(inverse_scale, squares, squares[first_chunk:])
        # Summed in float64: squares that are finite in float32 may have a sum that is not.
        keep = self._optimizer.may_step([squares.to(torch.float64).sum()])
        taken = keep.to(torch.int32).view(1)
        self._update(inverse_scale, taken)
        if self._others:
            self._update_others(inverse_scale, taken)
        # Autograd does not see what kernels write: a graph that has saved a weight must raise in its backward.
        torch.autograd.graph.increment_version(list(self._written()))

    def _make_vectors(self) -> None:
        """Launch what makes the vectors that layers will have if the step is taken."""
        kernels, tables = self._kernels, self._tables
        kernels.inspect_records[(len(self._layers),)](
            tables.layers, self._at, self._layer_numbers, BLOCK_SIZES.long, num_warps=8
        )
        for group_index, (first, count) in tables.matrices_of.items():
            group = self._groups[group_index]
            kernels.blend_vectors[(count,)](
                tables.matrices, self._at, self._layer_numbers, self._matrix_numbers, self._vectors,
                float(group["running_average"]), first, BLOCK_SIZES.long, num_warps=8,
            )  # fmt: skip

    def _measure(self, inverse_scale: torch.Tensor, squares: torch.Tensor, chunk_squares: torch.Tensor) -> None:
        """Launch the first pass over gradients, and what makes squares and scales of its parts."""
        kernels, tables = self._kernels, self._tables
        for launch in tables.tile_launches:
            group = self._groups[launch.group_index]
            kernels.measure_tiles[(launch.tiles.length,)](
                tables.tiles, tables.matrices, self._at, self._gradients_at, self._vectors, inverse_scale,
                float(group["momentum"]), _sign(group), launch.tiles.first, tables.has_left, launch.is_aligned,
                launch.rows, launch.columns, num_warps=8,
            )  # fmt: skip
        for group_index, (first, count) in tables.blocks_of.items():
            group = self._groups[group_index]
            kernels.reduce_parts[(count,)](
                tables.blocks, tables.matrices, self._at, self._gradients_at, self._vectors, self._block_sums,
                inverse_scale, float(group["momentum"]), _sign(group), first, tables.has_left, BLOCK_SIZES.parts,
                BLOCK_SIZES.vector,
            )  # fmt: skip
        for group_index, (first, count) in tables.matrices_of.items():
            damping, output_damping = self._groups[group_index]["damping"], self._groups[group_index]["output_damping"]
            kernels.find_matrix_numbers[(count,)](
                tables.matrices, self._block_sums, self._matrix_numbers, float(damping),
                float(damping if output_damping is None else output_damping), first, BLOCK_SIZES.vector,
            )  # fmt: skip
        kernels.find_layer_numbers[(len(self._layers),)](
            tables.layers, tables.matrices, self._at, self._matrix_numbers, self._layer_numbers, squares,
            BLOCK_SIZES.vector,
        )  # fmt: skip
        for chunks in tables.chunk_launches:
            self._first_order_kernels.measure_chunks[(chunks.chunks.length,)](
                tables.chunks, self._first_order_gradients_at, chunk_squares, inverse_scale, chunks.chunks.first,
                chunks.is_aligned, BLOCK_SIZES.flat,
            )  # fmt: skip

    def _update(self, inverse_scale: torch.Tensor, taken: torch.Tensor) -> None:
        """Launch the second pass over gradients: momentum and weights, and then vectors."""
        kernels, tables = self._kernels, self._tables
        for launch in tables.tile_launches:
            group = self._groups[launch.group_index]
            rate, is_tensor = _rate(group)
            kernels.update_tiles[(launch.tiles.length,)](
                tables.tiles, tables.matrices, self._at, self._gradients_at, self._vectors, self._matrix_numbers,
                self._layer_numbers, taken, inverse_scale, rate, float(group["momentum"]), float(group["weight_decay"]),
                _sign(group), LEAST, launch.tiles.first, tables.has_left, is_tensor, launch.is_aligned,
                BLOCK_SIZES.max_repeats * launch.rows, launch.rows, launch.columns, num_warps=8,
            )  # fmt: skip
        kernels.commit_vectors[(tables.counts["matrices"],)](
            tables.layers, tables.matrices, self._at, self._vectors, taken, BLOCK_SIZES.long, num_warps=8
        )

    def _update_others(self, inverse_scale: torch.Tensor, taken: torch.Tensor) -> None:
        count = len(self._others)
        self._first_order_kernels.count_steps[-(-count // BLOCK_SIZES.vector),](
            self._first_order_at, taken, count, BLOCK_SIZES.vector
        )
        for launch in self._tables.chunk_launches:
            self._update_chunks(launch, inverse_scale, taken)

    def _update_chunks(self, launch: ChunkLaunch, inverse_scale: torch.Tensor, taken: torch.Tensor) -> None:
        kernels, group = self._first_order_kernels, self._groups[launch.group_index]
        rate, is_tensor = _rate(group)
        where = (self._tables.chunks, self._first_order_at, self._first_order_gradients_at, taken, inverse_scale, rate)
        decay, sign = float(group["weight_decay"]), _sign(group)
        how = (launch.chunks.first, is_tensor, launch.is_aligned, BLOCK_SIZES.flat)
        if group["rule"] == SGD:
            kernels.update_sgd[(launch.chunks.length,)](*where, float(group["momentum"]), decay, sign, *how)
            return
        beta1, beta2 = map(float, group["betas"])
        betas = (beta1, 1 - beta1, _log(beta1), beta2, 1 - beta2, _log(beta2))
        kernels.update_adamw[(launch.chunks.length,)](*where, *betas, float(group["eps"]), decay, sign, *how)

    def _written(self) -> Iterator[torch.Tensor]:
        for layer in self._layers:
            yield layer.weight
            if layer.bias is not None:
                yield layer.bias
        for p, _ in self._others:
            yield p


def _scratch(device: torch.device, *sizes: int) -> tuple[torch.Tensor, ...]:
    """Return float32 buffers of some sizes, in one allocation; they are not initialized."""
    padded = [-(-max(size, 1) // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT for size in sizes]
    return tuple(torch.empty(sum(padded), dtype=torch.float32, device=device).split(padded))


def _rate(group: ParameterGroup) -> tuple[Number, bool]:
    """Return a group's learning rate, and whether it is a tensor."""
    lr = learning_rate(group)
    return (lr, True) if isinstance(lr, torch.Tensor) else (float(lr), False)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _sign(group: ParameterGroup) -> float:
    return -1.0 if group["maximize"] else 1.0


def _groups_of(layers: list[Layer], others: list[ParameterInGroup], device: torch.device) -> dict[int, ParameterGroup]:
    """Return parameter groups by identity, in the order of their numbers; raise if a hyperparameter is a tensor.

    Kernels take hyperparameters besides ``lr`` as arguments, and reading a tensor would wait for the device.
    """
    groups = {id(group): group for group in [*(layer.group for layer in layers), *(group for _, group in others)]}
    for group in groups.values():
        values = (
            *(group["momentum"], group["weight_decay"], group["damping"], group["output_damping"]),
            *(group["running_average"], group["eps"], *group["betas"]),
        )
        if any(isinstance(value, torch.Tensor) for value in values):
            raise UnsupportedStepError("hyperparameters besides lr are tensors")
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.device != device:
            raise UnsupportedStepError(f"lr is a tensor on {lr.device}")
    return groups


def _addresses_of(optimizer: VectorOptimizer, layers: list[Layer], others: list[ParameterInGroup]) -> _Addresses:
    """Return the device addresses of all tensors in a step."""
    tensors: tuple[list[torch.Tensor | None], ...] = (
        [x for layer in layers for x in _tensors_of(layer)],
        [x for layer in layers for x in GradientTensors(layer.grad, layer.bias_grad)],
        [x for p, group in others for x in _first_order_tensors(p, optimizer.state[p], group)],
        [p.grad for p, _ in others],
    )
    return _Addresses(*([0 if x is None else x.data_ptr() for x in table] for table in tensors))


def _tensors_of(layer: Layer) -> LayerTensors:
    state, bias_state = layer.state, layer.bias_state or {}
    return LayerTensors(
        weight=layer.weight,
        momentum=state["momentum_buffer"],
        bias=layer.bias,
        bias_momentum=bias_state.get("momentum_buffer"),
        record=state["record"],
        input_vector=state["input_vector"],
        output_vector=state.get("output_vector"),
        size=state["size"],
    )


def _first_order_tensors(p: torch.Tensor, state: ParameterState, group: ParameterGroup) -> FirstOrderTensors:
    if group["rule"] == SGD:
        return FirstOrderTensors(p, first_moment=state["momentum_buffer"], second_moment=None, step=None)
    return FirstOrderTensors(p, first_moment=state["exp_avg"], second_moment=state["exp_avg_sq"], step=state["step"])


def _gradients_are_plain(layers: list[Layer], others: list[ParameterInGroup], addresses: _Addresses) -> bool:
    """Return whether all gradients are float32 tensors, aligned, and stored in the order of their parameters.

    Everything else that a plan depends on is unchanged where addresses are those of the last step.
    """
    if any(address % VECTORIZED_BYTES for address in (*addresses.gradients, *addresses.first_order_gradients)):
        return False
    pairs: list[tuple[Any, Any]] = [(layer.weight, layer.grad) for layer in layers]
    pairs += [(layer.bias, layer.bias_grad) for layer in layers if layer.bias is not None]
    pairs += [(p, p.grad) for p, _ in others]
    return all(type(g) is torch.Tensor and g.dtype == torch.float32 and g.stride() == p.stride() for p, g in pairs)


def _layer_shape(layer: Layer, groups: dict[int, ParameterGroup], device: torch.device) -> LayerShape:
    """Return what a layer's tables depend on; raise UnsupportedStepError if kernels cannot read its tensors."""
    weight, state = layer.weight, layer.state
    vectors, outputs = state["input_vector"], state.get("output_vector")
    wide = [weight, layer.grad, state["momentum_buffer"]]
    taps = _taps_before_channels(wide)
    _check_tensors([*wide, vectors, state["record"], state["size"]], device)
    if outputs is not None:
        _check_tensors([outputs], device)
    if layer.bias is not None and layer.bias_grad is not None and layer.bias_state is not None:
        bias = [layer.bias, layer.bias_grad, layer.bias_state["momentum_buffer"]]
        _taps_before_channels(bias)
        _check_tensors(bias, device)
    matrices = vectors.shape[0]
    return LayerShape(
        group_index=list(groups).index(id(layer.group)),
        matrices=matrices,
        rows=weight.shape[0] // matrices,
        columns=weight.numel() // weight.shape[0],
        taps=taps,
        has_outputs=outputs is not None,
        has_bias=layer.bias is not None,
        is_transposed=layer.columns_first,
        is_aligned=_are_aligned(wide),
    )


def _first_order_shape(
    p: torch.Tensor,
    group: ParameterGroup,
    state: ParameterState,
    groups: dict[int, ParameterGroup],
    device: torch.device,
) -> FirstOrderShape:
    """Return what a parameter's chunks depend on; raise UnsupportedStepError if kernels cannot read its tensors."""
    own = _first_order_tensors(p, state, group)
    wide = [x for x in (p.grad, p, own.first_moment, own.second_moment) if x is not None]
    _check_tensors(wide if own.step is None else [*wide, own.step], device)
    _taps_before_channels(wide)
    return FirstOrderShape(list(groups).index(id(group)), p.numel(), _are_aligned(wide))


def _are_aligned(tensors: list[torch.Tensor]) -> bool:
    return all(x.data_ptr() % VECTORIZED_BYTES == 0 for x in tensors)


def _check_tensors(tensors: list[torch.Tensor], device: torch.device) -> None:
    """Raise UnsupportedStepError if kernels cannot read a tensor; its order in memory is looked at elsewhere."""
    for x in tensors:
        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            raise UnsupportedStepError(f"a tensor is a {type(x).__name__}")
        if x.dtype != torch.float32 or x.device != device:
            raise UnsupportedStepError(f"a parameter, its gradient or its state is of {x.dtype} on {x.device}")
        if x.numel() == 0 or x.numel() >= 2**31:  # kernels count a tensor's elements in int32
            raise UnsupportedStepError(f"a parameter has {x.numel()} elements")


def _taps_before_channels(tensors: list[torch.Tensor]) -> int:
    """Return how many taps of a kernel come before channels in memory, of tensors that must agree.

    It is 1 for contiguous tensors, and the size of the kernel for ``torch.channels_last``.
    """
    orders = set()
    for x in tensors:
        if x.is_contiguous():
            orders.add(1)
        elif x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
            orders.add(x.shape[2] * x.shape[3])
        else:
            raise UnsupportedStepError(f"a parameter of shape {tuple(x.shape)} or its gradient is not contiguous")
    if len(orders) > 1:
        raise UnsupportedStepError("a gradient is stored in another order than its parameter")
    return orders.pop()
