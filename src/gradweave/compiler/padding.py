"""Padding of a batch to the shapes of the first one, where that leaves the results of the step as they are."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem, gt
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional

from gradweave._compat.functions import map_nested
from gradweave.step_graph.errors import NotOneGraphError

IGNORE_INDEX = -100
"""Target that cross entropy ignores unless it is given another one; so do the models of transformers."""

_VIEWS = ("view", "view_as", "reshape", "flatten", "unsqueeze", "squeeze", "transpose", "permute", "t", "contiguous")
_COPIES = ("clone", "detach", "long", "to", "int")
_LOSSES = (functional.cross_entropy, functional.nll_loss)
_COMPARISONS = ("eq", "ne")


def padding_values(forward: GraphModule, inputs: Sequence[Any], batch: Sequence[Any]) -> dict[int, int | None]:
    """Return the values that the tensors of integers in a batch may be padded with.

    Targets of a loss that ignores a value are padded with it. For anything else, such as token ids or masks, no value
    is known to have no effect.

    Args:
        forward: The objective as Dynamo captured it.
        inputs: Of the forward.
        batch: Leaves of the batch.

    Returns:
        The value by position in the batch; None where none is known.
    """
    nodes = [node for node in forward.graph.nodes if node.op == "placeholder"]
    by_id = {id(x): node for x, node in zip(inputs, nodes, strict=True)}
    values: dict[int, int | None] = {}
    for index, leaf in enumerate(batch):
        if isinstance(leaf, torch.Tensor) and _holds_integers(leaf):
            node = by_id.get(id(leaf))
            ignored = set() if node is None else _ignored_values(node)
            values[index] = ignored.pop() if len(ignored) == 1 else None
    return values


def _holds_integers(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype in (torch.bool, torch.uint8))


def _ignored_values(node: Node) -> set[int | None]:
    """Return the values that the readers of a tensor of integers ignore; with None if one ignores none."""
    values: set[int | None] = set()
    for user in node.users:
        if _is_view_or_copy(user, node):
            values |= _ignored_values(user)
        elif user.target in _LOSSES and _is_target(user, node):
            values.add(user.kwargs.get("ignore_index", IGNORE_INDEX))  # type: ignore[arg-type]
        elif _is_comparison(user):
            values.add(int(user.args[1]))  # type: ignore[arg-type]
        else:
            values.add(None)
    return values


def _is_view_or_copy(user: Node, node: Node) -> bool:
    """Return whether an operation changes only the shape or the type of a tensor."""
    if not user.args or user.args[0] is not node or user.all_input_nodes != [node] or node in user.args[1:]:
        return False
    return user.target is getitem or (user.op == "call_method" and user.target in (*_VIEWS, *_COPIES))


def _is_target(user: Node, node: Node) -> bool:
    given = user.args[1] if len(user.args) > 1 else user.kwargs.get("target")
    others = [user.args[0] if user.args else user.kwargs.get("input"), user.kwargs.get("weight")]
    return (
        given is node and node not in others and user.kwargs.get("reduction", "mean") != "none" and len(user.args) <= 2
    )


def _is_comparison(user: Node) -> bool:
    name = getattr(user.target, "__name__", user.target)
    return name in _COMPARISONS and len(user.args) == 2 and isinstance(user.args[1], int)


def pad_batch(batch: Any, leaves: Sequence[Any], shapes: Sequence[Any], values: dict[int, int | None]) -> Any:
    """Return a batch padded to shapes: floats with 0, masks with False, integers with their padding values.

    Args:
        batch: The batch.
        leaves: Its leaves.
        shapes: To pad to, for each leaf; None for one that is no tensor.
        values: Of :func:`padding_values`.

    Raises:
        NotOneGraphError: If it cannot be padded so that the padding has no effect.
    """
    if len(leaves) != len(shapes):
        raise NotOneGraphError("the batch has another structure than the first one, which padding cannot change")
    position = -1

    def pad(value: Any) -> Any:
        nonlocal position
        position += 1
        shape = shapes[position]
        if not isinstance(value, torch.Tensor) or value.shape == shape:
            return value
        if shape is None or value.dim() != len(shape) or any(map(gt, value.shape, shape)):
            raise NotOneGraphError(f"padding cannot make {shape and tuple(shape)} of a tensor of {tuple(value.shape)}")
        fill = values.get(position) if _holds_integers(value) else 0
        if fill is None:
            raise NotOneGraphError(
                f"tensor {position} of the batch has integers, and no value to pad them with is known: only targets of "
                "a cross entropy can be ignored; pad token ids and masks where batches are made, to few lengths"
            )
        padded = value.new_full(shape, fill)
        padded[tuple(slice(size) for size in value.shape)] = value
        return padded

    return map_nested(pad, batch)
