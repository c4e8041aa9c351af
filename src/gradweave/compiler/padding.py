"""Filling a batch up to the shapes of the first one, where that leaves the step as it is."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem, gt
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional

from gradweave._compat.eager import map_nested
from gradweave.step_graph.errors import NotOneGraphError

LEFT_OUT = -100
"""What cross entropy leaves out, unless it is told of another value; so do the models of transformers."""

_SHAPES = ("view", "view_as", "reshape", "flatten", "unsqueeze", "squeeze", "transpose", "permute", "t", "contiguous")
_COPIES = ("clone", "detach", "long", "to", "int")
_LOSSES = (functional.cross_entropy, functional.nll_loss)
_COMPARISONS = ("eq", "ne")


def fillings_of(forward: GraphModule, inputs: Sequence[Any], batch: Sequence[Any]) -> dict[int, int | None]:
    """What each tensor of integers in a batch may be padded with.

    Targets of a loss that leaves a value out are padded with that. Of anything else, token ids or masks for example, no
    value is known that would not count.

    Args:
        forward: The objective as Dynamo captured it.
        inputs: Of the forward.
        batch: Leaves of the batch.

    Returns:
        The value by the position in the batch; None where none is known.
    """
    nodes = [node for node in forward.graph.nodes if node.op == "placeholder"]
    by_id = {id(x): node for x, node in zip(inputs, nodes, strict=True)}
    fillings: dict[int, int | None] = {}
    for index, leaf in enumerate(batch):
        if isinstance(leaf, torch.Tensor) and _needs_a_filling(leaf):
            node = by_id.get(id(leaf))
            values = set() if node is None else _left_out(node)
            fillings[index] = values.pop() if len(values) == 1 else None
    return fillings


def _needs_a_filling(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype in (torch.bool, torch.uint8))


def _left_out(node: Node) -> set[int | None]:
    """The values that those leave out to whom a tensor of integers goes; None for whoever leaves out none."""
    values: set[int | None] = set()
    for user in node.users:
        if _only_views(user, node):
            values |= _left_out(user)
        elif user.target in _LOSSES and _is_target(user, node):
            values.add(user.kwargs.get("ignore_index", LEFT_OUT))  # type: ignore[arg-type]
        elif _is_comparison(user):
            values.add(int(user.args[1]))  # type: ignore[arg-type]
        else:
            values.add(None)
    return values


def _only_views(user: Node, node: Node) -> bool:
    """Whether somebody makes another shape, or another type, of a tensor's values and of nothing else."""
    if not user.args or user.args[0] is not node or user.all_input_nodes != [node] or node in user.args[1:]:
        return False
    return user.target is getitem or (user.op == "call_method" and user.target in (*_SHAPES, *_COPIES))


def _is_target(user: Node, node: Node) -> bool:
    given = user.args[1] if len(user.args) > 1 else user.kwargs.get("target")
    others = [user.args[0] if user.args else user.kwargs.get("input"), user.kwargs.get("weight")]
    return (
        given is node and node not in others and user.kwargs.get("reduction", "mean") != "none" and len(user.args) <= 2
    )


def _is_comparison(user: Node) -> bool:
    name = getattr(user.target, "__name__", user.target)
    return name in _COMPARISONS and len(user.args) == 2 and isinstance(user.args[1], int)


def padded(batch: Any, leaves: Sequence[Any], wanted: Sequence[Any], fillings: dict[int, int | None]) -> Any:
    """A batch filled up: floats with 0, masks with False, integers with what their fillings say.

    Raises:
        NotOneGraphError: It cannot be filled up so that only the wanted part counts.
    """
    if len(leaves) != len(wanted):
        raise NotOneGraphError("the batch has another structure than the first one, which padding cannot mend")
    position = -1

    def pad(value: Any) -> Any:
        nonlocal position
        position += 1
        shape = wanted[position]
        if not isinstance(value, torch.Tensor) or value.shape == shape:
            return value
        if shape is None or value.dim() != len(shape) or any(map(gt, value.shape, shape)):
            raise NotOneGraphError(f"padding cannot make {shape and tuple(shape)} of a tensor of {tuple(value.shape)}")
        fill = fillings.get(position) if _needs_a_filling(value) else 0
        if fill is None:
            raise NotOneGraphError(
                f"tensor {position} of the batch has integers, and nothing is known to pad them with: only targets of "
                "a cross entropy can be left out; pad token ids and masks where batches are made, to few lengths"
            )
        filled = value.new_full(shape, fill)
        filled[tuple(slice(size) for size in value.shape)] = value
        return filled

    return map_nested(pad, batch)
