"""The differentiated part of a step: a loss function of a model and a batch, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from gradweave._compat.functions import map_nested
from gradweave._compat.tensors import memory_of
from gradweave.step_graph.errors import NotOneGraphError, RefusedError
from gradweave.step_graph.nodes import phase

_LOSS_MARK = {"gradweave": "loss"}
"""Annotation of the operation that returns the loss, by which it is found among the captured outputs."""


@dataclass(frozen=True)
class Objective:
    """A function to differentiate.

    Attributes:
        forward: Takes the inputs and returns a sequence of outputs.
        inputs: Weights, buffers and batch.
        trainable: Positions of the inputs that are parameters to update.
        loss_output: Position of the loss among the outputs.
    """

    forward: Callable[..., Any]
    inputs: Sequence[torch.Tensor]
    trainable: Sequence[int]
    loss_output: int


def loss_and_extras(result: Any) -> tuple[torch.Tensor, Any]:
    """Split what ``loss_fn`` returned into the loss and what came with it; None if nothing did."""
    loss, extras = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise RefusedError("loss_fn must return a loss of one element, or a tuple of it and anything else")
    return loss, extras


def mark_loss(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss by an operation that :func:`loss_output_of` recognizes in a captured graph."""
    with torch.fx.traceback.annotate(_LOSS_MARK):
        return loss.view(())


def outputs_of(forward: GraphModule) -> Sequence[Any]:
    """Return what a captured forward returns."""
    outputs: Sequence[Any] = forward.graph.output_node().args[0]  # type: ignore[assignment]
    return outputs


def loss_output_of(forward: GraphModule) -> int:
    """Return the position of the marked loss among the outputs of a captured forward."""
    for index, node in enumerate(outputs_of(forward)):
        if isinstance(node, Node) and (node.meta.get("custom") or {}).items() >= _LOSS_MARK.items():
            return index
    raise RefusedError("loss_fn returned something that does not depend on the model; return the loss first")


def on_device_of(model: nn.Module, batch: Any) -> Any:
    """Return a batch whose CPU tensors are copied to the device of a model."""
    device = next((p.device for p in model.parameters()), None)
    if device is None or device.type == "cpu":
        return batch

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return value.to(device, non_blocking=True)
        return value

    return map_nested(move, batch)


def differentiate(
    objective: Objective, inputs: Sequence[torch.Tensor], scale: Sequence[torch.Tensor] = ()
) -> tuple[list[Any], list[torch.Tensor], list[torch.Tensor | None]]:
    """Run forward and backward, each traced in its phase.

    Args:
        objective: The function.
        inputs: In the place of its own.
        scale: The scale of the loss, first; empty if there is none.

    Returns:
        The outputs, the trainable parameters, and their gradients.
    """
    leaves = list(inputs)
    with phase("forward"):
        for index in objective.trainable:
            leaves[index] = inputs[index].detach().requires_grad_()
    params = [leaves[index] for index in objective.trainable]
    with torch.enable_grad():
        with phase("forward"):
            outputs = list(objective.forward(*leaves))
        loss = outputs[objective.loss_output]
        with phase("backward"):
            grads = torch.autograd.grad(loss * scale[0] if scale else loss, params, allow_unused=True)
    with phase("gradients"):
        return outputs, params, _own_memory(params, grads)


def _copied_like(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a copy of a gradient that is laid out as its parameter; as an operation that writes nothing, if it can."""
    if p.is_contiguous():
        return grad.clone(memory_format=torch.contiguous_format)
    return torch.empty_like(p).copy_(grad)


def _own_memory(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return gradients as autograd accumulates them into ``.grad``.

    ``torch.autograd.grad`` may return one tensor for two parameters, or one that is laid out unlike its parameter;
    ``.grad`` never shares memory with another one and has the strides of its parameter. Clipping and unscaling in place
    would otherwise act on shared memory twice.
    """
    seen: set[int] = set()
    own: list[torch.Tensor | None] = []
    for p, grad in zip(params, grads, strict=True):
        if grad is None:
            own.append(grad)
            continue
        if grad.layout is not torch.strided:
            raise NotOneGraphError(f"a parameter of shape {tuple(p.shape)} has a gradient of layout {grad.layout}")
        memory = memory_of(grad)
        is_own = memory not in seen and grad.stride() == p.stride()
        own.append(grad if is_own else _copied_like(p, grad))
        seen.add(memory)
    return own
