"""A compiled step on two streams: weight gradients and updates of the upper layers beside the rest of backward.

What Inductor compiles as one runs in its own order on one stream. So the graph is cut in three pieces, each compiled by
itself: one that comes first, and two that need nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gradweave.errors import UnsupportedError
from gradweave.schedule.builders import single
from gradweave.schedule.costs import Costs
from gradweave.schedule.policies import plan
from gradweave.schedule.tasks import Kind
from gradweave.step_graph.nodes import changed_by, is_mutable, memories_of, phase_of
from gradweave.step_graph.tasks import Place

_PLACE = "gradweave_place"
WORTH_IT = 0.03
"""Share of a step's time that must be won, by prediction, before a graph is cut: that has a price of its own."""


def upper_layers(costs: Costs, layers: Sequence[str], device: torch.device) -> int | None:
    """Return the first layer whose weight gradients and updates belong on a second stream; None if that does not pay.

    Args:
        costs: Measured of the model.
        layers: Names of the step's layers.
        device: That runs the step; a CPU has one stream.
    """
    names = [layer.name for layer in costs.layers]
    if len(names) != len(layers) or any(ours and ours != theirs for ours, theirs in zip(layers, names, strict=True)):
        raise UnsupportedError(f"costs of {costs.name}", "the compiled model has other layers", "measure its own costs")
    if device.type != "cuda":
        return None
    graph = single(costs, steps=2)
    best = plan(graph, policy="side_region")
    stock = plan(graph, policy="in_order")
    if best.simulate().step_time > (1 - WORTH_IT) * stock.simulate().step_time:
        return None
    first: int = best.options["first"]
    return first


def note_places(places: dict[Node, Place]) -> None:
    """Note the task of each operation in its metadata, which copies of the graph keep."""
    for node, place in places.items():
        node.meta[_PLACE] = place


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a graph.

    Attributes:
        graph: Takes the inputs and returns the outputs.
        inputs: Nodes of the whole graph.
        outputs: Nodes of the whole graph.
    """

    graph: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


@dataclass(frozen=True)
class Cut:
    """A graph in three pieces, the last two of which may run at the same time.

    Attributes:
        whole: The graph.
        first: Runs before both.
        side: Weight gradients and updates of upper layers; it has no outputs.
        rest: Everything else.
    """

    whole: GraphModule
    first: Piece
    side: Piece
    rest: Piece


def cut(whole: GraphModule, layer: int) -> Cut | None:
    """Cut off the weight gradients and updates of ``layer`` and those above it.

    Returns:
        The pieces; None if nothing can be cut off, or if nothing of backward would be left to run beside it, as when
        every update needs all gradients because of a common norm or a scaled loss.
    """
    nodes = [node for node in whole.graph.nodes if node.op in ("call_function", "get_attr")]
    places = _places(nodes)
    side = {n for n in nodes if (p := places.get(n)) and p.kind in (Kind.W, Kind.U) and p.layer >= layer}
    first: set[Node] = set()
    # A node that must stay takes what it needs with it, and what is left may be in conflict with that: repeat until the
    # pieces are independent.
    while True:
        first = _first(nodes, places, side, layer)
        side -= first
        stay = _needed_elsewhere(side) | _in_conflict(nodes, side, first)
        if not stay:
            break
        side -= stay
    rest = [node for node in nodes if node not in side and node not in first]
    is_backward_left = any((place := places.get(node)) and place.kind is not Kind.U for node in rest)
    if not any(is_mutable(node) for node in side) or not is_backward_left or _out_of_order(nodes, first):
        return None
    pieces = _pieces(whole, nodes, [first, side, set(rest)])
    return Cut(whole, *pieces) if pieces and not pieces[1].outputs else None


def _places(nodes: Sequence[Node]) -> dict[Node, Place]:
    """Return the task of each operation; those that passes have added inherit it from a user."""
    places: dict[Node, Place] = {}
    for node in reversed(nodes):
        place = node.meta.get(_PLACE) or next((places[user] for user in node.users if user in places), None)
        if place is not None:
            places[node] = place
    return places


def _first(nodes: Sequence[Node], places: dict[Node, Place], side: set[Node], layer: int) -> set[Node]:
    """Return forward, the input gradients of the upper layers, and all that these and the side need.

    Items of a tuple go with the tuple.
    """
    found: set[Node] = set()
    for node in reversed(nodes):
        place = places.get(node)
        upper = place is not None and place.kind is Kind.X and place.layer >= layer
        is_needed = any(user in found or user in side for user in node.users)
        if node not in side and (phase_of(node) == "forward" or upper or is_needed):
            found.add(node)
    return found | {node for node in nodes if node.target is getitem and node.args[0] in found}


def _needed_elsewhere(side: Collection[Node]) -> set[Node]:
    """Return the nodes that the rest of the step, or its caller, uses."""
    return {node for node in side if any(user not in side for user in node.users)}


def _in_conflict(nodes: Sequence[Node], side: Collection[Node], first: Collection[Node]) -> set[Node]:
    """Return the nodes that write to memory that the rest uses, or use memory that the rest writes to."""
    others = [node for node in nodes if node not in side and node not in first]
    touched = {memory for node in others for memory in memories_of((node, *node.all_input_nodes))}
    written = {memory for node in others for memory in memories_of(changed_by(node))}
    return {
        node
        for node in side
        if touched & memories_of(changed_by(node)) or written & memories_of((node, *node.all_input_nodes))
    }


def _out_of_order(nodes: Sequence[Node], first: Collection[Node]) -> bool:
    """Return whether the first piece passes an operation that it must follow.

    It does if it uses memory that an operation before it in the whole graph has written, or writes memory that such an
    operation uses.
    """
    touched: set[int] = set()
    written: set[int] = set()
    for node in nodes:
        own, changed = memories_of((node, *node.all_input_nodes)), memories_of(changed_by(node))
        if node not in first:
            touched |= own
            written |= changed
        elif written & own or touched & changed:
            return True
    return False


def _pieces(whole: GraphModule, nodes: Sequence[Node], parts: Sequence[set[Node]]) -> list[Piece] | None:
    """Return a graph for each part; None if one would change what another has made.

    Views of the whole graph's inputs are made in every piece that uses them. If a piece got both an input and a view of
    it as inputs, its compiler would take them for two tensors, and a write to one would not be seen in the other.
    """
    given = {node for node in whole.graph.nodes if node.op == "placeholder"}
    own = memories_of(given)
    views = [n for n in nodes if not is_mutable(n) and memories_of([n]) & own]
    full = [_with_views(part, views) for part in parts]
    inputs = [
        tuple(dict.fromkeys(used for n in nodes if n in part for used in n.all_input_nodes if used not in part))
        for part in full
    ]
    crossing = [[node for node in needed if node not in given] for needed in inputs]
    changed = {memory for node in nodes for memory in memories_of(changed_by(node))}
    if any(is_mutable(node) or memories_of([node]) & changed for needed in crossing for node in needed):
        return None
    returned = {*whole.graph.output_node().all_input_nodes, *(node for needed in crossing for node in needed)}
    return [
        _piece(whole, [node for node in nodes if node in more], needed, [n for n in nodes if n in part & returned])
        for part, more, needed in zip(parts, full, inputs, strict=True)
    ]


def _with_views(part: Collection[Node], views: Sequence[Node]) -> set[Node]:
    """Return a part with the views that it uses, and the views that these are of."""
    more = set(part)
    for view in reversed(views):
        if any(user in more for user in view.users):
            more.add(view)
    return more


def _piece(whole: GraphModule, nodes: Sequence[Node], inputs: tuple[Node, ...], outputs: Sequence[Node]) -> Piece:
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Piece(GraphModule(whole, graph), inputs, tuple(outputs))


class TwoStreams:
    """A graph that was cut, compiled piece by piece; called like the whole graph.

    Args:
        parts: The pieces.
        examples: Inputs of the whole graph.
        lower: Compiles a piece, given examples of its inputs.
    """

    def __init__(
        self,
        parts: Cut,
        examples: Sequence[torch.Tensor],
        lower: Callable[[GraphModule, list[torch.Tensor]], Callable[..., Any]],
    ) -> None:
        graph = parts.whole.graph
        self._given = [node for node in graph.nodes if node.op == "placeholder"]
        self._returned = graph.output_node().args[0]
        known = dict(zip(self._given, examples, strict=True))
        self._compiled: dict[Piece, Callable[..., Any]] = {}
        for piece in (parts.first, parts.side, parts.rest):
            inputs = [known[node] if node in known else _like(node) for node in piece.inputs]
            self._compiled[piece] = lower(piece.graph, inputs)
        self._parts = parts
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *given: torch.Tensor) -> list[Any]:
        """Run the pieces; ``side`` and ``rest`` at the same time, on a GPU."""
        parts, values = self._parts, dict(zip(self._given, given, strict=True))
        device = given[0].device
        self._run(parts.first, values)
        if device.type != "cuda":
            self._run(parts.side, values)
            self._run(parts.rest, values)
        else:
            # The two waits are a fork and a join. In a capture they become edges of the CUDA graph, and the second one
            # is required: a capture may not end while another stream is part of it. Memory needs no record_stream():
            # what crosses to the side stream is referenced by `values` until the main stream waits for it, and what the
            # side piece allocates itself belongs to its own stream.
            side = self._stream = self._stream or torch.cuda.Stream(device)
            main = torch.cuda.current_stream(device)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                self._run(parts.side, values)
            self._run(parts.rest, values)
            main.wait_stream(side)
        return [values[value] if isinstance(value, Node) else value for value in self._returned]  # type: ignore[union-attr]

    def _run(self, piece: Piece, values: dict[Node, Any]) -> None:
        made = self._compiled[piece](*(values[node] for node in piece.inputs))
        values.update(zip(piece.outputs, made, strict=True))


def _like(node: Node) -> torch.Tensor:
    """Return a tensor of the shape and layout of an operation's result."""
    value: torch.Tensor = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
