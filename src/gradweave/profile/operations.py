"""The operations of forward and backward as a graph that can be run task by task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.fx import Graph, Node

from gradweave.errors import GradweaveError
from gradweave.step_graph.objective import loss_and_extras
from gradweave.step_graph.recording import Mark, run_by_task
from gradweave.step_graph.tasks import module_names, split_convolution_backward, tasks_of


class Operations:
    """Forward and backward of one batch, operation by operation.

    Args:
        graph: Of the operations; its convolutions are split, so that their tasks can be told apart.
        inputs: Of the graph.
        gradients: The operation that returns the gradient of a parameter, for those that have one.
        trainable: All parameters that are trained; those that the graph does not read belong to no layer.
        model: Whose modules are the layers.
        constants: The module that the graph takes its constants from.

    Attributes:
        layers: The module name of every layer.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[torch.Tensor],
        gradients: Mapping[nn.Parameter, Node],
        trainable: Sequence[nn.Parameter],
        model: nn.Module,
        *,
        constants: nn.Module | None = None,
    ) -> None:
        split_convolution_backward(graph)
        read = set(map(id, inputs))
        params = [p for p in trainable if id(p) in read]
        number = {id(p): index for index, p in enumerate(params)}
        given: dict[Node, list[int]] = {}
        for p in params:
            if p in gradients:
                given.setdefault(gradients[p], []).append(number[id(p)])
        owners = [number.get(id(x)) for x in inputs]
        self._device = params[0].device.type
        self._graph = graph
        self._inputs = list(inputs)
        self._constants = nn.Module() if constants is None else constants
        self._tasks = tasks_of(graph, owners, module_names(params, model), given)
        self.layers = self._tasks.layers

    def run(self, mark: Mark) -> None:
        """Run everything once more, each task of a layer in a context of its own.

        Autocast is off: its casts are operations of the graph already.
        """
        with torch.no_grad(), torch.autocast(self._device, enabled=False):
            run_by_task(self._constants, self._graph, self._inputs, self._tasks.places, mark)


def differentiate_eagerly(
    model: nn.Module,
    loss_fn: Callable[..., object],
    params: Sequence[nn.Parameter],
    batch: Sequence[object],
    *,
    between: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, dict[nn.Parameter, torch.Tensor]]:
    """Return the loss, and the gradients of the parameters it depends on; call ``between`` before backward."""
    loss, _ = loss_and_extras(loss_fn(model, *batch))
    between()
    grads = torch.autograd.grad(loss, params, allow_unused=True) if params and loss.requires_grad else ()
    found = {p: grad for p, grad in zip(params, grads, strict=False) if grad is not None}
    if not found:
        raise GradweaveError("the loss depends on no parameter of the optimizer that requires a gradient")
    return loss, found
