"""The task of the schedule that each operation of a step belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Graph, Node

from gradweave.schedule.tasks import Kind
from gradweave.step_graph.nodes import changed_by, gradient_of, phase_of, root


class Place(NamedTuple):
    """A kind of task, and the number of the layer it is for."""

    kind: Kind
    layer: int


@dataclass(frozen=True)
class StepTasks:
    """The tasks of a step.

    Attributes:
        places: The task of every operation.
        layers: The module name of every layer.
    """

    places: dict[Node, Place]
    layers: tuple[str, ...]


def tasks_of(
    graph: Graph,
    owners: Sequence[int | None],
    names: Sequence[str],
    gradients: Mapping[Node, Sequence[int]] | None = None,
) -> StepTasks:
    """Assign every operation of a step, or of its forward and backward, to a task.

    Layers are the modules that have trainable parameters of their own, in the order in which forward first reads them.
    An operation without parameters belongs to the layer before it in forward, and to the layer that waits for it in
    backward. Backward is W where it serves the gradients of one layer and reads no other one's weights, and X
    otherwise; what is recomputed in it is X of the layer that needs it first. Clipping counts as update; what is one
    number for all layers, such as a norm, is layer 0's, unless it is written to a layer's state. What
    averages gradients over ranks is C; a message of several layers is that of the first of them.

    Args:
        graph: Its nodes know their phases.
        owners: For each input of the graph, the trainable parameter that it is, or belongs to; None for others.
        names: The module name of each trainable parameter, as by :func:`module_names`.
        gradients: The parameters that an operation returns the gradient of, in a graph without the update by which that
            is known otherwise.
    """
    nodes = list(graph.nodes)
    inputs = zip((node for node in nodes if node.op == "placeholder"), owners, strict=True)
    owner = {node: index for node, index in inputs if index is not None}
    layers = _layers(names, nodes, owner)
    weights = {node: layers[names[index]] for node, index in owner.items()}
    given = {node: {layers[names[index]] for index in of} for node, of in (gradients or {}).items()}
    for node in nodes:
        if (sent := gradient_of(node)) is not None:
            given[node] = {layers[names[sent]]}
    serves = _served_layers(nodes, weights, given)
    weights = dict(weights)
    places: dict[Node, Place] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        used = node.all_input_nodes
        reads = {weights[n] for n in used if n in weights}
        if len(used) == 1 and reads:
            weights[node] = min(reads)  # a view or a cast of a weight
        phase = phase_of(node)
        if phase == "forward":
            before = [places[n].layer for n in used if n in places]
            places[node] = Place(Kind.F, max([*reads, *before], default=0))
        elif phase == "backward":
            places[node] = _backward_place(reads, serves[node])
        elif phase == "communication":
            carried = [places[n].layer for n in used if n in places and places[n].kind is Kind.C]
            places[node] = Place(Kind.C, min([*given.get(node, ()), *carried], default=0))
        else:
            written = {weights[target] for n in changed_by(node) if (target := root(n)) in weights}
            served = written or serves[node]  # what writes state of a layer is that layer's, whatever else it serves
            places[node] = Place(Kind.U, min(served) if len(served) == 1 else 0)
    return StepTasks(places, tuple(layers))


def _backward_place(reads: set[int], serves: set[int]) -> Place:
    if len(serves) == 1 and reads <= serves:
        return Place(Kind.W, min(serves))
    # What serves a layer above that of the weights it reads is recomputed forward, or passes a second use of weights.
    is_above = bool(reads) and max(serves, default=0) > max(reads)
    return Place(Kind.X, max(serves if is_above else reads or serves, default=0))


def module_names(params: Sequence[nn.Parameter], model: nn.Module) -> list[str]:
    """Return the name of the module that each parameter belongs to; ``""`` for those that no module has."""
    module_of = {id(p): name for name, module in model.named_modules() for p in module.parameters(recurse=False)}
    return [module_of.get(id(p), "") for p in params]


def _layers(names: Sequence[str], nodes: Sequence[Node], owner: Mapping[Node, int]) -> dict[str, int]:
    """Number the modules in the order in which the graph first reads their parameters."""
    order: dict[str, int] = {}
    for node in nodes:
        for used in node.all_input_nodes:
            index = owner.get(used)
            if index is not None:
                order.setdefault(names[index], len(order))
    for name in names:
        order.setdefault(name, len(order))
    return order


def _served_layers(
    nodes: Sequence[Node], weights: Mapping[Node, int], gradients: Mapping[Node, set[int]]
) -> dict[Node, set[int]]:
    """Return the layers whose weights, state or gradients each operation's result flows into.

    A common norm makes every gradient flow into every weight, so results that become one number are not followed.
    """
    serves: dict[Node, set[int]] = {node: set(gradients.get(node, ())) for node in nodes}
    for node in reversed(nodes):
        serves[node] |= {weights[target] for n in changed_by(node) if (target := root(n)) in weights}
        phase = phase_of(node)
        if phase == "communication" and node not in gradients:
            continue  # a message has gradients of several layers, known apart where they are put into it
        ends_here = phase in ("gradients", "update") and _is_one_number(node)
        for used in node.all_input_nodes:
            if not ends_here or _is_one_number(used):
                serves[used] |= serves[node]
    return serves


def _is_one_number(node: Node) -> bool:
    value: Any = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def split_convolution_backward(graph: Graph) -> None:
    """Split a convolution's backward into two operations: for its input, and for its weight and bias.

    ATen has one operation for all three gradients. The layer below waits for the first only, and X and W can be told
    apart, and run apart, only if they are two.
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.convolution_backward.default or node.kwargs:
            continue
        *arguments, (wants_input, wants_weight, wants_bias) = node.args
        if not (wants_input and (wants_weight or wants_bias)) or any(user.target is not getitem for user in node.users):
            continue
        with graph.inserting_before(node):
            of_weight, of_input = (
                graph.call_function(node.target, (*arguments, mask))
                for mask in ([False, wants_weight, wants_bias], [True, False, False])
            )
        of_weight.meta, of_input.meta = dict(node.meta), dict(node.meta)
        for user in list(node.users):
            user.replace_input_with(node, of_input if user.args[1] == 0 else of_weight)
        graph.erase_node(node)
