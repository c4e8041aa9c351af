"""Trading time for memory: activations computed anew in backward instead of kept from forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gradweave._compat.tracing import enters_autocast, fake_mode, fake_of, is_any_autocast_enabled, rematerialize
from gradweave.compiler.refusals import NotOneGraphError

AS_TORCH_DOES = 1.0
"""The budget at which only what costs no time is computed anew, and what the user has marked."""


def with_recomputation(
    forward: GraphModule,
    inputs: Sequence[torch.Tensor],
    trainable: Sequence[int],
    loss_output: int,
    budget: float | None,
    *,
    exact: bool,
) -> Callable[..., Any]:
    """A forward whose backward computes activations anew, so as to keep to a budget.

    Args:
        forward: As Dynamo captured it.
        inputs: Of the forward; not changed.
        trainable: Which inputs need gradients.
        loss_output: Which output is differentiated.
        budget: Share of the activations that may be kept; None for what ``torch.compile`` would keep.
            What activation checkpointing marks is computed anew in any case, its random numbers being
            those of the forward.
        exact: Whether results must be those of the eager operations, bit for bit. Then nothing is
            computed anew without a budget or checkpointing.
    """
    if budget is None:
        if exact and not is_checkpointed(forward):
            return forward
        budget = AS_TORCH_DOES
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
        return rematerialize(_only_the_loss_has_gradients(forward, loss_output), fakes, budget, decompose=not exact)


def is_checkpointed(forward: GraphModule) -> bool:
    """Whether a part of a forward is marked by ``torch.utils.checkpoint``."""
    return any("checkpoint" in str(node.target) for node in forward.graph.nodes if node.op == "call_function")


def _casts_weights_again(forward: GraphModule, trainable: Sequence[int]) -> bool:
    """Whether autocast casts for several uses of a weight, each of which would have a gradient to be cast back."""
    modules = [module for module in forward.modules() if isinstance(module, GraphModule)]
    if not (is_any_autocast_enabled() or any(enters_autocast(n) for module in modules for n in module.graph.nodes)):
        return False
    inputs = [node for node in forward.graph.nodes if node.op == "placeholder"]
    return any(_uses(forward, inputs[index]) > 1 for index in trainable)


def _uses(module: GraphModule, value: Node) -> int:
    """How many operations use a value, those inside of what is checkpointed included."""
    count = 0
    for user in value.users:
        inner = user.args[0] if user.args else None
        if isinstance(inner, Node) and inner.op == "get_attr":
            body: Any = module.get_submodule(str(inner.target))
            inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
            count += sum(_uses(body, inputs[place]) for place, given in enumerate(user.args[1:]) if given is value)
        else:
            count += 1
    return count


def _only_the_loss_has_gradients(forward: GraphModule, loss_output: int) -> GraphModule:
    """A forward whose other outputs take no part in backward, where they would have gradients of zero."""
    graph = Graph()
    outputs = list(graph.graph_copy(forward.graph, {}))  # type: ignore[arg-type]
    for index, output in enumerate(outputs):
        if index != loss_output and isinstance(output, Node) and isinstance(_example(output), torch.Tensor):
            outputs[index] = graph.call_method("detach", (output,))
    graph.output(tuple(outputs))
    return GraphModule(forward, graph)


def _example(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))
