"""Private names of autograd: the backward that runs now, and its nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

NO_BACKWARD = -1
"""The value of :func:`current_backward` where none is running."""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Ask for a call when the backward that now runs ends; there is none if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward that now runs; one inside another has its own."""


saved_tensors_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
"""Return the innermost hooks that autograd hands saved tensors to, as under checkpointing; None without."""


def saved_tensors_are_hooked() -> bool:
    """Return whether hooks get what autograd saves."""
    return saved_tensors_hooks() is not None


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Return whether the backward that now runs leaves its graph for another one."""


def parameters_behind(result: torch.Tensor) -> list[torch.nn.Parameter]:
    """Return the parameters that would get a gradient from a backward of a result."""
    found, seen, left = [], {None}, [result.grad_fn]
    while left:
        node: Any = left.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            found.append(leaf)
        left += [following for following, _ in node.next_functions]
    return found


def lasting_node(y: torch.Tensor) -> tuple[Any, int] | None:
    """Return the node of the operation that gave a tensor, and the number of the output that it is.

    Of a view it is what gave its base: a view gets another node when the base is changed in place. None if the
    view is more than another shape.
    """
    base = y._base
    if base is not None:
        if not (base.numel() == y.numel() and base.is_contiguous() and y.is_contiguous()):
            return None
        y = base
    node = y.grad_fn
    return None if node is None else (node, y.output_nr)


def kept_copy(node: Any) -> torch.Tensor | None:
    """Return the input that a layer's node keeps, which may be autocast's copy; None if it keeps none.

    Must not be called while hooks get what autograd saves: reading it would call them.
    """
    try:
        kept = getattr(node, _INPUT_OF.get(node.name(), ""), None)
    except RuntimeError:  # a backward has been there already
        return None
    return kept if isinstance(kept, torch.Tensor) else None


_INPUT_OF = {"AddmmBackward0": "_saved_mat1", "ConvolutionBackward0": "_saved_input"}


def notes_of_node(node: Any) -> dict[Any, Any]:
    """Return the notes that are kept with a node of autograd, for as long as it lives."""
    notes: dict[Any, Any] = node.metadata
    return notes


def will_be_accumulated(param: torch.Tensor) -> bool:
    """Return whether the backward that now runs puts a leaf's gradient into ``.grad``, and does not return it."""
    return _is_reached(param, if_returned=False)


def gets_gradient(param: torch.Tensor) -> bool:
    """Return whether the backward that now runs computes a leaf's gradient, for ``.grad`` or to return it."""
    return _is_reached(param, if_returned=True)


def _is_reached(param: torch.Tensor, *, if_returned: bool) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node))
    except RuntimeError:  # of a leaf that torch.autograd.grad() was asked for
        return if_returned


def gradient_hooks(param: torch.Tensor) -> int:
    """Return the number of hooks that get a parameter's gradient."""
    return len(param._backward_hooks or ()) + len(param._post_accumulate_grad_hooks or ())
