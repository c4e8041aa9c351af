"""A compiled step on two streams: weight gradients and updates of the upper layers beside the rest of backward.

What Inductor compiles is one piece, and runs in its own order on one stream. So the graph is cut in three: what
comes first, and two pieces that need nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gradweave.errors import ArgumentError
from gradweave.schedule.builders import single
from gradweave.schedule.costs import Costs
from gradweave.schedule.policies import plan
from gradweave.schedule.tasks import Kind
from gradweave.step_graph.nodes import changed_by, is_mutable, memories_of, phase_of
from gradweave.step_graph.tasks import Place

_PLACE = "gradweave_place"
WORTH_IT = 0.03
"""Share of a step that must be won, by prediction, before a graph is cut for it: that has a price of its own."""


def upper_layers(costs: Costs, layers: Sequence[str], device: torch.device) -> int | None:
    """From which layer on weight gradients and updates are best put on a second stream; None if that does not pay.

    Args:
        costs: Measured of the model.
        layers: Names of the step's layers.
        device: Where it runs; a CPU has one stream.
    """
    names = [layer.name for layer in costs.layers]
    if len(names) != len(layers) or any(ours and ours != theirs for ours, theirs in zip(layers, names, strict=True)):
        raise ArgumentError("costs", costs.name, "measure them with the model that is compiled: its layers are others")
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
    """Writes to each operation which task it is of; copies of the graph keep that."""
    for node, place in places.items():
        node.meta[_PLACE] = place


@dataclass(frozen=True)
class Piece:
    """A part of a graph.

    Attributes:
        graph: Takes the inputs, returns the outputs.
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
    """Cuts a step's graph so that what ``layer`` and those above it do to their weights is on its own.

    Returns None if nothing can be, or nothing of backward would be left to run beside it: as when every update needs
    all gradients, because of a common norm or of a loss that is scaled.
    """
    nodes = [node for node in whole.graph.nodes if node.op in ("call_function", "get_attr")]
    places = _places(nodes)
    side = {n for n in nodes if (p := places.get(n)) and p.kind in (Kind.W, Kind.U) and p.layer >= layer}
    first: set[Node] = set()
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
    """Of every operation; those that were made later have that of who uses them."""
    places: dict[Node, Place] = {}
    for node in reversed(nodes):
        place = node.meta.get(_PLACE) or next((places[user] for user in node.users if user in places), None)
        if place is not None:
            places[node] = place
    return places


def _first(nodes: Sequence[Node], places: dict[Node, Place], side: set[Node], layer: int) -> set[Node]:
    """Forward, the input gradients of the upper layers, and all that these and the side need.

    What is taken out of a tuple goes with it.
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
    """What the rest of the step, or its caller, uses."""
    return {node for node in side if any(user not in side for user in node.users)}


def _in_conflict(nodes: Sequence[Node], side: Collection[Node], first: Collection[Node]) -> set[Node]:
    """What writes to memory that the other piece touches, or reads what that writes."""
    others = [node for node in nodes if node not in side and node not in first]
    touched = {memory for node in others for memory in memories_of((node, *node.all_input_nodes))}
    written = {memory for node in others for memory in memories_of(changed_by(node))}
    return {
        node
        for node in side
        if touched & memories_of(changed_by(node)) or written & memories_of((node, *node.all_input_nodes))
    }


def _out_of_order(nodes: Sequence[Node], first: Collection[Node]) -> bool:
    """Whether what comes first now touches memory that something before it has written, or writes what that touches."""
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
    """A graph for each part; None where one would change what another has made.

    Views of the whole graph's inputs are made in every piece that uses them: a piece that got both an input and a view
    of it would not know that to change the one is to change the other.
    """
    given = {node for node in whole.graph.nodes if node.op == "placeholder"}
    own = memories_of(given)
    views = [n for n in nodes if not is_mutable(n) and memories_of([n]) & own]
    full = [_with_views(part, views) for part in parts]
    inputs = [
        tuple(dict.fromkeys(used for n in nodes if n in part for used in n.all_input_nodes if used not in part))
        for part in full
    ]
    handed_on = [[node for node in needed if node not in given] for needed in inputs]
    changed = {memory for node in nodes for memory in memories_of(changed_by(node))}
    if any(is_mutable(node) or memories_of([node]) & changed for needed in handed_on for node in needed):
        return None
    wanted = {*whole.graph.output_node().all_input_nodes, *(node for needed in handed_on for node in needed)}
    return [
        _piece(whole, [node for node in nodes if node in more], needed, [n for n in nodes if n in part & wanted])
        for part, more, needed in zip(parts, full, inputs, strict=True)
    ]


def _with_views(part: Collection[Node], views: Sequence[Node]) -> set[Node]:
    """A part with the views that it uses."""
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


class OnTwoStreams:
    """A step that was cut, compiled piece by piece; called like the whole of it.

    Args:
        parts: The cut.
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
        self._pieces = {}
        for piece in (parts.first, parts.side, parts.rest):
            made = [known[node] if node in known else _like(node) for node in piece.inputs]
            self._pieces[id(piece)] = lower(piece.graph, made)
        self._parts = parts
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *given: torch.Tensor) -> list[Any]:
        """Takes the step; what crosses from one piece to another lives until both streams have met again."""
        parts, values = self._parts, dict(zip(self._given, given, strict=True))
        device = given[0].device
        self._run(parts.first, values)
        if device.type != "cuda":
            self._run(parts.side, values)
            self._run(parts.rest, values)
        else:
            side = self._stream = self._stream or torch.cuda.Stream(device)
            main = torch.cuda.current_stream(device)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                self._run(parts.side, values)
            self._run(parts.rest, values)
            main.wait_stream(side)
        return [values[value] if isinstance(value, Node) else value for value in self._returned]  # type: ignore[union-attr]

    def _run(self, piece: Piece, values: dict[Node, Any]) -> None:
        made = self._pieces[id(piece)](*(values[node] for node in piece.inputs))
        values.update(zip(piece.outputs, made, strict=True))


def _like(node: Node) -> torch.Tensor:
    """A tensor of the shape and layout that an operation gives."""
    value: torch.Tensor = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
