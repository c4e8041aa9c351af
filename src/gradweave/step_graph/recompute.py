"""Trading time for memory: activations recomputed in backward instead of kept from forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gradweave._compat.tracing import enters_autocast, fake_mode, fake_of, is_any_autocast_enabled, rematerialize
from gradweave.step_graph.errors import NotOneGraphError

DEFAULT_BUDGET = 1.0
"""The budget of ``torch.compile``: it recomputes what costs no time, and what is checkpointed."""


def with_recomputation(
    forward: GraphModule,
    inputs: Sequence[torch.Tensor],
    trainable: Sequence[int],
    loss_output: int,
    budget: float | None,
    *,
    exact: bool,
) -> Callable[..., Any]:
    """Return a forward whose backward recomputes activations to keep to a budget.

    Args:
        forward: As Dynamo captured it.
        inputs: Of the forward; not changed.
        trainable: Positions of the inputs that need gradients.
        loss_output: Position of the output that is differentiated.
        budget: Share of the activations that may be kept; None for :data:`DEFAULT_BUDGET`. Checkpointed parts are
            recomputed in any case, with the random numbers of the forward.
        exact: Whether results must be those of the eager operations, bit for bit. Then nothing is recomputed without
            a budget or checkpointing.
    """
    if budget is None:
        if exact and not is_checkpointed(forward):
            return forward
        budget = DEFAULT_BUDGET
    # The partitioner traces each use of a weight with a cast of its own, and sums up their gradients in float32. In an
    # eager step autocast's cache casts the weight once, and gradients are summed up in the low precision.
    if exact and _casts_weights_again(forward, trainable):
        raise NotOneGraphError(
            "a weight is used more than once under autocast and activation checkpointing: an eager step casts it once, "
            'a graph with a backward of its own for each use; give lower="inductor", or no checkpoints'
        )
    mode = fake_mode()
    fakes = [fake_of(mode, x) for x in inputs]
    for index in trainable:
        fakes[index].requires_grad_()
    with torch.enable_grad():
        return rematerialize(_with_gradient_of_loss_only(forward, loss_output), fakes, budget, decompose=not exact)


def is_checkpointed(forward: GraphModule) -> bool:
    """Return whether a part of a forward is under ``torch.utils.checkpoint``."""
    return any("checkpoint" in str(node.target) for node in forward.graph.nodes if node.op == "call_function")


def _casts_weights_again(forward: GraphModule, trainable: Sequence[int]) -> bool:
    """Return whether autocast may cast a weight for several uses, each with a gradient to be cast back."""
    modules = [module for module in forward.modules() if isinstance(module, GraphModule)]
    if not (is_any_autocast_enabled() or any(enters_autocast(n) for module in modules for n in module.graph.nodes)):
        return False
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    return any(_count_uses(forward, inputs[index]) > 1 for index in trainable)


def _count_uses(module: GraphModule, value: Node) -> int:
    """Return how many operations use a value, those in the bodies of checkpoints included."""
    count = 0
    for user in value.users:
        inner = user.args[0] if user.args else None
        if isinstance(inner, Node) and inner.op == "get_attr":
            body: Any = module.get_submodule(str(inner.target))
            inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
            count += sum(
                _count_uses(body, inputs[place]) for place, given in enumerate(user.args[1:]) if given is value
            )
        else:
            count += 1
    return count


def _with_gradient_of_loss_only(forward: GraphModule, loss_output: int) -> GraphModule:
    """Return a forward whose other outputs are detached.

    The partitioner gives every output that requires a gradient a tangent, which would be zero here: parameters that
    only such an output depends on would get gradients of zero instead of none.
    """
    graph = Graph()
    outputs = list(graph.graph_copy(forward.graph, {}))  # type: ignore[arg-type]
    for index, output in enumerate(outputs):
        if index != loss_output and isinstance(output, Node) and isinstance(_example(output), torch.Tensor):
            outputs[index] = graph.call_method("detach", (output,))
    graph.output(tuple(outputs))
    return GraphModule(forward, graph)


def _example(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))
