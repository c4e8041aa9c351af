"""Splitting off what depends on no gradient: step counts, bias corrections, rates.

These are a few numbers per parameter, computed from hyperparameters and from state such as step counts. As Python
numbers they could not change in a captured graph; inlined into the update of every weight they would be computed for
each element. So they become a small program of their own that runs first, in double precision as Python would, and
hands 0-dimensional tensors to the rest. Parameters whose counts are equal share one computation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gradweave._compat.tensors import ITEM
from gradweave._compat.tracing import is_symbolic, trace_to_graph
from gradweave.compiler.tensor_forms import FUNCTIONS, IN_PLACE, new_value
from gradweave.compiler.trace import TracedStep
from gradweave.step_graph.nodes import changed_by, memories_of, memory_of_node, root


@dataclass(frozen=True)
class SplitStep:
    """A step as two graphs.

    Attributes:
        scalars: Takes the hyperparameters as one vector and a value per class; returns the new values of the classes
            that advance, then the scalars that the main graph needs.
        main: Takes the forward's inputs, the remaining state, and the scalars.
        main_scalars: For each of the last inputs of the main graph, the scalar that it is.
        classes: Of 0-dimensional state slots that always have the same value.
        advancing: Positions of the classes that get a new value.
        main_state: The state slots that the main graph takes.
    """

    scalars: GraphModule
    main: GraphModule
    main_scalars: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]
    advancing: tuple[int, ...]
    main_state: tuple[int, ...]


def moved_slots(traced: TracedStep, equal: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the state slots that :func:`split_scalars` would take out of the main graph."""
    return frozenset(slot for members in _classes(traced, equal)[0] for slot in members)


def _classes(
    traced: TracedStep, equal: Sequence[Sequence[int]]
) -> tuple[tuple[tuple[int, ...], ...], set[Node], list[Node], list[Node]]:
    """Return the classes that can be moved as a whole, the nodes that move, and the inputs of state and numbers.

    A class moves only if all its members do. Keeping one back may keep back what depends on it, so this is repeated
    until nothing changes.
    """
    nodes = list(traced.graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    count = len(traced.optimizer.state_slots)
    state, numbers = placeholders[traced.input_count :][:count], placeholders[traced.input_count + count :]
    classes = tuple(map(tuple, equal))
    while True:
        moved = _movable(nodes, {state[slot] for members in classes for slot in members}, set(numbers))
        whole = tuple(members for members in classes if all(state[slot] in moved for slot in members))
        if whole == classes:
            return classes, moved, state, numbers
        classes = whole


def split_scalars(
    traced: TracedStep, equal: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> SplitStep:
    """Split a traced step.

    Args:
        traced: The step.
        equal: Classes of 0-dimensional state slots with equal values.
        dtype: Of the scalars that the main graph gets.
        device: Of all scalars.
    """
    nodes = list(traced.graph.graph.nodes)
    classes, moved, state, numbers = _classes(traced, equal)
    members = [[state[slot] for slot in slots] for slots in classes]
    advancing = tuple(index for index, same in enumerate(members) if _is_changed(same[0], nodes))
    scalars, boundary = _scalar_graph(nodes, moved, members, advancing, numbers, dtype, device)
    main, uses = _main_graph(traced.graph, nodes, moved, boundary, shared=device.type == "cpu")
    left = tuple(slot for slot, node in enumerate(state) if node not in moved)
    return SplitStep(scalars, main, uses, classes, advancing, left)


def _is_changed(state: Node, nodes: Sequence[Node]) -> bool:
    return any(root(argument) is state for node in nodes for argument in changed_by(node))


def _movable(nodes: Sequence[Node], state: set[Node], numbers: set[Node]) -> set[Node]:
    """Return the nodes that depend on given state and numbers alone, and change nothing else.

    What is changed by a node that stays, stays too.
    """
    stay: set[Node] = set()
    while True:
        moved = (state | numbers) - stay
        for node in nodes:
            used = node.all_input_nodes
            if node.op == "call_function" and node not in stay and used and all(n in moved for n in used):
                moved.add(node)
        changed = memories_of(n for node in nodes if node not in moved for n in changed_by(node))
        touched = {node for node in moved if memory_of_node(node) in changed}
        if not touched:
            return moved
        stay |= touched


class _Emulator:
    """Evaluates traced operations on tensors in the place of numbers, once for equal arguments."""

    def __init__(self) -> None:
        self.values: dict[Node, Any] = {}
        self._computed: dict[Hashable, tuple[Any, Any]] = {}
        """Results by operation and arguments. Keys name tensors by id, so the arguments are kept alive with them."""

    def run(self, node: Node) -> None:
        """Compute a node; an in-place operation gives its argument a new value."""
        args = map_arg(node.args, lambda n: self.values[root(n)])
        kwargs = map_arg(node.kwargs, lambda n: self.values[root(n)])
        key = (node.target, _key(args), _key(kwargs))
        if key not in self._computed:
            self._computed[key] = self._compute(node, args, kwargs), (args, kwargs)
        self.values[root(node)] = self._computed[key][0]

    def _compute(self, node: Node, args: Any, kwargs: Any) -> Any:
        if node.target in FUNCTIONS or node.target in IN_PLACE:
            return new_value(node.target, args, kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _key(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(_key(part) for part in value)
    if isinstance(value, dict):
        return tuple((name, _key(part)) for name, part in value.items())
    return id(value) if isinstance(value, (torch.Tensor, torch.fx.Proxy)) else (type(value), value)


def _scalar_graph(
    nodes: Sequence[Node],
    moved: set[Node],
    classes: Sequence[Sequence[Node]],
    advancing: Sequence[int],
    numbers: Sequence[Node],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[GraphModule, list[list[Node]]]:
    """Return the scalar program, and the traced nodes whose values it returns after the classes' new values."""
    boundary = [
        node
        for node in nodes
        if node in moved and any(user not in moved and user.op != "placeholder" for user in node.users)
    ]
    returned: list[list[Node]] = []

    def program(vector: torch.Tensor, values: list[torch.Tensor]) -> list[torch.Tensor]:
        emulator = _Emulator()
        for index, number in enumerate(numbers):
            emulator.values[number] = vector[index]
        for members, value in zip(classes, values, strict=True):
            emulator.values.update(dict.fromkeys(members, value))
        results_by_id: dict[int, tuple[torch.Tensor, list[Node]]] = {}
        wanted = set(boundary)
        for node in nodes:
            if node in moved and node.op == "call_function":
                emulator.run(node)
            if node in wanted:
                value = emulator.values[root(node)]
                results_by_id.setdefault(id(value), (value, []))[1].append(node)
        results = []
        for value, owners in results_by_id.values():
            traced = owners[0].meta.get("val")
            results.append(value.to(dtype if is_symbolic(traced) else traced.dtype))  # type: ignore[union-attr]
            returned.append(owners)
        new = [emulator.values[classes[index][0]].to(values[index].dtype) for index in advancing]
        return [*new, *results]

    vector = torch.zeros(len(numbers), dtype=torch.float64, device=device)
    examples = [torch.ones((), dtype=same[0].meta["val"].dtype, device=device) for same in classes]
    graph = trace_to_graph(program)(vector, examples)
    return graph, returned


def _main_graph(
    module: GraphModule, nodes: Sequence[Node], moved: set[Node], scalars: Sequence[Sequence[Node]], *, shared: bool
) -> tuple[GraphModule, tuple[int, ...]]:
    """Return the rest of the step, with inputs for the scalars after its own, and the scalar that each of these is.

    Unless they are shared, every use of a scalar has an input of its own: Inductor tries to fuse, pair by pair, all
    kernels that read one buffer, and the updates of different weights have nothing else in common. That saves much time
    in compiling, and costs none in a captured graph; on the CPU, where inputs are handed over in every step, it would.
    """
    graph = Graph()
    values: dict[Node, Node] = {}
    for node in nodes:
        if node.op == "placeholder" and node not in moved:
            values[node] = graph.placeholder(node.name)
            values[node].meta = dict(node.meta)
    # Placeholders come first in a graph, so the uses are collected before any operation is copied.
    scalar_of = {owner: index for index, owners in enumerate(scalars) for owner in owners}
    uses = [(node, used) for node in nodes if node not in moved for used in node.all_input_nodes if used in scalar_of]
    inputs: dict[tuple[Node, Node], Node] = {}
    which: list[int] = []
    of_scalar: dict[int, Node] = {}
    for use in uses:
        scalar = scalar_of[use[1]]
        if not shared or scalar not in of_scalar:
            of_scalar[scalar] = graph.placeholder(f"scalar_{len(which)}")
            which.append(scalar)
        inputs[use] = of_scalar[scalar]
    for node in nodes:
        if node in moved or node.op == "placeholder":
            continue
        known = {used: inputs.get((node, used)) or values[used] for used in node.all_input_nodes}
        if node.op == "call_function" and (
            node.target is ITEM or any(is_symbolic(n.meta.get("val")) for n in node.all_input_nodes)
        ):
            values[node] = _in_tensor_form(graph, node, known)
            values[node].meta = {**node.meta, **values[node].meta}
            values[node].meta.pop("unbacked_bindings", None)  # of a number, which is a tensor now
        else:
            values[node] = graph.node_copy(node, known.__getitem__)
    return GraphModule(module, graph), tuple(which)


def _in_tensor_form(graph: Graph, node: Node, values: dict[Node, Node]) -> Node:
    """Append an operation with tensors for its numbers; in place where it was."""
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)

    def proxy(argument: Node) -> Any:
        return torch.fx.Proxy(values[argument], tracer)

    result: Node = new_value(node.target, map_arg(node.args, proxy), dict(map_arg(node.kwargs, proxy))).node
    if node.target in IN_PLACE:
        return graph.call_function(torch.ops.aten.copy_.default, (values[node.args[0]], result))  # type: ignore[index]
    return result
