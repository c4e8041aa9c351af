"""Numbers that an optimizer keeps in Python and changes in each step, such as a count of steps.

A graph has them as inputs. What they become is computed from them by the operations that were traced, on Python
numbers and on the host: nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from gradweave._compat.tracing import drop_last_outputs, is_symbolic
from gradweave.step_graph.errors import NotOneGraphError


class PythonCountsError(NotOneGraphError):
    """A traced step has changed Python numbers that are constants of its graph: they must be inputs.

    Args:
        places: Of these numbers in the optimizer.
        message: To the user, where they cannot be inputs.
    """

    def __init__(self, places: Sequence[Any], message: str) -> None:
        self.places = tuple(places)
        super().__init__(message)


def take_out_counts(graph: GraphModule, count: int, numbers: int) -> Callable[[Sequence[Any]], list[Any]]:
    """Remove the last outputs of a step's graph, which are new Python numbers, and return what computes them.

    Args:
        graph: The step's; its last inputs are numbers.
        count: Number of new numbers.
        numbers: Number of the graph's inputs that are numbers.

    Raises:
        NotOneGraphError: If one depends on the value of a tensor.
    """
    results = drop_last_outputs(graph, count)
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    counting = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs[len(inputs) - numbers :]:
        copies[node] = counting.placeholder(node.name)
    wanted = _needed_for(results)
    for node in graph.graph.nodes:
        if node not in wanted or node in copies:
            continue
        if node.op != "call_function" or any(used not in copies for used in node.all_input_nodes):
            raise NotOneGraphError("the optimizer keeps a number in Python that depends on the values of tensors")
        copies[node] = counting.node_copy(node, copies.__getitem__)
    counting.output([copies[result] if isinstance(result, Node) else result for result in results])
    graph.graph.eliminate_dead_code(_is_not_of_numbers)
    graph.recompile()
    run = GraphModule({}, counting)
    return lambda values: list(run(*values))


_AHEAD = 3


def serves_other_steps(
    holds: Callable[[Sequence[Any]], bool], counted: Callable[[Sequence[Any]], Sequence[Any]], numbers: Sequence[Any]
) -> bool:
    """Return whether a graph is right for any of a few steps before or after the one that it was traced for.

    One that is not was traced through code that needs a count itself, as ``math.exp(count)`` does: each step would need
    a graph of its own.

    Args:
        holds: Returns whether the graph is right for other numbers.
        counted: Returns all numbers as they are a step later.
        numbers: Those that it was traced for.
    """
    later = list(numbers)
    for _ in range(_AHEAD):
        later = list(counted(later))
        if holds(later):
            return True
    next_ones = counted(numbers)
    return any(
        holds([now - back * (then - now) for now, then in zip(numbers, next_ones, strict=True)])
        for back in range(1, _AHEAD + 1)
    )


def _needed_for(results: Sequence[Any]) -> set[Node]:
    needed: set[Node] = set()
    waiting = [result for result in results if isinstance(result, Node)]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def _is_not_of_numbers(node: Node) -> bool:
    """Return whether a node must stay in a graph even if it has no users."""
    return node.op != "call_function" or not is_symbolic(node.meta.get("val"))
