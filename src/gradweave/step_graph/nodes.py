"""Properties of a graph's nodes: the arguments they change, the memory they name, their phase of the step."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch.fx import Node

from gradweave._compat.tensors import memory_of
from gradweave._compat.tracing import schema_of

Phase = Literal["forward", "backward", "gradients", "communication", "update", ""]
"""A part of a training step; ``"gradients"`` is what is done with them between backward and update, and
``"communication"`` the averaging over ranks."""

_PHASE = "gradweave_phase"
_GRADIENT = "gradweave_gradient"


def phase(name: Phase) -> AbstractContextManager[Any]:
    """Return a context whose traced operations belong to a phase."""
    return torch.fx.traceback.annotate({_PHASE: name})


def gradient(number: int) -> AbstractContextManager[Any]:
    """Return a context whose traced operations put the gradient of a trainable parameter into a message."""
    return torch.fx.traceback.annotate({_GRADIENT: number})


def gradient_of(node: Node) -> int | None:
    """Return the number of the trainable parameter whose gradient a node puts into a message; None for others."""
    number: int | None = (node.meta.get("custom") or {}).get(_GRADIENT)
    return number


def set_phase(node: Node, name: Phase) -> None:
    """Assign a node to a phase, in a graph that is not traced under :func:`phase`."""
    node.meta["custom"] = {_PHASE: name}


def phase_of(node: Node) -> Phase:
    """Return the phase of a node; ``""`` if it has none."""
    name: Phase = (node.meta.get("custom") or {}).get(_PHASE, "")
    return name


def is_mutable(node: Node) -> bool:
    """Return whether a node changes any of its arguments."""
    schema = schema_of(node.target)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def changed_by(node: Node) -> list[Node]:
    """Return the arguments that a node changes in place."""
    if not is_mutable(node):
        return []
    changed: list[Any] = []
    for position, argument in enumerate(schema_of(node.target).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            changed += [part for part in (given if isinstance(given, (list, tuple)) else [given]) if part is not None]
    return changed


def root(node: Any) -> Any:
    """Return the node whose value an in-place operation, or a chain of them, returns."""
    while isinstance(node, Node) and is_mutable(node):
        node = node.args[0]
    return node


def memory_of_node(node: Node) -> int | None:
    """Return an identity of the memory behind a node's value, the same for all views of it; None for numbers."""
    value = node.meta.get("val")
    return memory_of(value) if isinstance(value, torch.Tensor) else None


def memories_of(nodes: Iterable[Node]) -> set[int]:
    """Return the identities of the memory behind the values of some nodes."""
    return {memory for node in nodes if (memory := memory_of_node(node)) is not None}


def extent_of(node: Node) -> tuple[int, int, int] | None:
    """Return the memory behind a node's value, with the first byte of it that the value covers and the one after it.

    Values of a dtype or a layout that says nothing of bytes cover all; None for numbers.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout is not torch.strided or any(isinstance(size, torch.SymInt) for size in value.shape):
        return memory_of(value), 0, sys.maxsize
    first = int(value.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    size = value.element_size()
    return memory_of(value), first * size, (last + 1) * size if value.numel() else first * size


def has_data_dependent_size(target: Any, indices: Sequence[Any]) -> bool:
    """Return whether the size of an operation's result depends on the values that it is computed from.

    Args:
        target: The operation.
        indices: Example tensors of its indices, if it is ``aten.index.Tensor``; None for those that are unknown.
    """
    if torch.Tag.dynamic_output_shape not in getattr(target, "tags", ()):
        return False
    # torch tags indexing as a whole, but only masks select as many elements as their values say.
    is_index = target is torch.ops.aten.index.Tensor
    return not is_index or any(index is None or index.dtype in (torch.bool, torch.uint8) for index in indices)
