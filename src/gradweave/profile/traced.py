"""Operations traced from a model that does more than operations of torch's, such as launching its own kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from gradweave._compat.tracing import as_it_was, compile_lock, dynamo_compile, fake_mode, fake_of, trace_to_graph
from gradweave.profile.operations import Operations
from gradweave.step_graph.objective import Objective, differentiate, loss_and_extras, loss_output_of, mark_loss
from gradweave.step_graph.recompute import with_recomputation


def trace_operations(
    model: nn.Module, loss_fn: Callable[..., Any], params: Sequence[nn.Parameter], batch: Sequence[Any]
) -> Operations:
    """Trace forward and backward of a batch to the operations that an eager step runs.

    Raises:
        Exception: Whatever torch's tracers raise for what they cannot trace.
    """
    traced: list[Operations] = []

    def backend(forward: GraphModule, _: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            with torch.no_grad():
                traced.append(_traced(forward, inputs, params, model))
                return forward(*inputs)

        return run

    def objective(*batch: Any) -> torch.Tensor:
        loss, _ = loss_and_extras(loss_fn(model, *batch))
        return mark_loss(loss)

    capture, forget = dynamo_compile(objective, backend, 1, exact=True)
    try:
        capture(*batch)
    finally:
        forget()
    (operations,) = traced
    return operations


def _traced(
    forward: GraphModule, inputs: Sequence[Any], params: Sequence[nn.Parameter], model: nn.Module
) -> Operations:
    own = set(map(id, params))
    trainable = [index for index, x in enumerate(inputs) if id(x) in own]
    loss_output = loss_output_of(forward)
    with_gradient: list[int] = []

    def forward_and_backward(*inputs: torch.Tensor) -> list[torch.Tensor]:
        _, _, grads = differentiate(objective, inputs)
        with_gradient.extend(index for index, grad in zip(trainable, grads, strict=True) if grad is not None)
        return [grad for grad in grads if grad is not None]

    with compile_lock(), torch.random.fork_rng([params[0].device] if params[0].is_cuda else []):
        function = with_recomputation(forward, inputs, trainable, loss_output, None, exact=True)
        objective = Objective(function, inputs, trainable, loss_output)
        mode = fake_mode()
        with as_it_was(), mode:
            module = trace_to_graph(forward_and_backward, as_eager=True)(*(fake_of(mode, x) for x in inputs))
    output = module.graph.output_node()
    gradients = {inputs[index]: node for index, node in zip(with_gradient, output.all_input_nodes, strict=True)}
    output.args = ((),)  # gradients are freed as soon as they are read, as those of recorded operations
    return Operations(module.graph, inputs, gradients, params, model, constants=module)
