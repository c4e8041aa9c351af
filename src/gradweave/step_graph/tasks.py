"""Which task of the schedule each operation of a traced step belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Node

from gradweave.compiler.trace import TracedStep, changed_by, phase_of, root
from gradweave.schedule.tasks import Kind


@dataclass(frozen=True)
class StepTasks:
    """The tasks of a step.

    Attributes:
        places: The task of every operation.
        layers: The name of each layer's module.
    """

    places: dict[Node, Place]
    layers: tuple[str, ...]


class Place(NamedTuple):
    """A kind of task, and the layer it is for."""

    kind: Kind
    layer: int


def tasks_of(traced: TracedStep, model: nn.Module) -> StepTasks:
    """The task of every operation.

    Layers are the modules that have trainable parameters of their own, in the order in which forward
    first reads them. What has no parameter goes with the layer before it in forward, and with the
    layer that waits for it in backward. Backward is W where it serves the gradients of one layer
    and reads no other one's weights, and X otherwise. Clipping counts as update; what is one number for all
    layers, such as a norm, is layer 0's.
    """
    nodes = list(traced.graph.graph.nodes)
    owners = dict(zip((n for n in nodes if n.op == "placeholder"), traced.owners, strict=True))
    owner = {node: index for node, index in owners.items() if index is not None}
    return tasks_among(nodes, owner, module_names(traced.optimizer.params, model), {})


def tasks_among(
    nodes: Sequence[Node], owner: Mapping[Node, int], names: Sequence[str], gradients: Mapping[Node, Sequence[int]]
) -> StepTasks:
    """As :func:`tasks_of`, of operations that need not be a whole step.

    Args:
        nodes: In their order; each knows its phase.
        owner: Which of the trainable parameters an input is, or belongs to.
        names: The module of each trainable parameter.
        gradients: Of which parameters an operation gives the gradient, where no update is there to tell.
    """
    layers = _layers(names, nodes, owner)
    owned = {node: layers[names[index]] for node, index in owner.items()}
    serves = _served(nodes, owned, {node: {layers[names[index]] for index in of} for node, of in gradients.items()})
    weights = dict(owned)
    places: dict[Node, Place] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        used = node.all_input_nodes
        reads = {weights[n] for n in used if n in weights}
        if len(used) == 1 and reads:
            weights[node] = min(reads)
        phase = phase_of(node)
        if phase == "forward":
            before = [places[n].layer for n in used if n in places]
            places[node] = Place(Kind.F, max([*reads, *before], default=0))
        elif phase == "backward":
            places[node] = _backward(reads, serves[node])
        else:
            places[node] = Place(Kind.U, min(serves[node]) if len(serves[node]) == 1 else 0)
    return StepTasks(places, tuple(layers))


def _backward(reads: set[int], serves: set[int]) -> Place:
    if len(serves) == 1 and reads <= serves:
        return Place(Kind.W, min(serves))
    return Place(Kind.X, max(reads or serves, default=0))


def module_names(params: Sequence[nn.Parameter], model: nn.Module) -> list[str]:
    """The module of each parameter."""
    module_of = {id(p): name for name, module in model.named_modules() for p in module.parameters(recurse=False)}
    return [module_of.get(id(p), "") for p in params]


def _layers(names: Sequence[str], nodes: Sequence[Node], owner: Mapping[Node, int]) -> dict[str, int]:
    """A number for each module, in the order in which the graph first reads their parameters."""
    order: dict[str, int] = {}
    for node in nodes:
        for used in node.all_input_nodes:
            index = owner.get(used)
            if index is not None:
                order.setdefault(names[index], len(order))
    for name in names:
        order.setdefault(name, len(order))
    return order


def _served(
    nodes: Sequence[Node], owned: Mapping[Node, int], gradients: Mapping[Node, set[int]]
) -> dict[Node, set[int]]:
    """The layers whose weights or state each operation's result goes into, or whose gradients it is.

    What becomes a single number, as all gradients do in their norm, is not followed further.
    """
    serves: dict[Node, set[int]] = {node: set(gradients.get(node, ())) for node in nodes}
    for node in reversed(nodes):
        serves[node] |= {owned[target] for n in changed_by(node) if (target := root(n)) in owned}
        ends_here = phase_of(node) in ("gradients", "update") and _is_one_number(node)
        for used in node.all_input_nodes:
            if not ends_here or _is_one_number(used):
                serves[used] |= serves[node]
    return serves


def _is_one_number(node: Node) -> bool:
    value: Any = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.dim() == 0
