"""Refusals of models and batches, before any rank waits for another."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradweave._compat.functions import flat_leaves
from gradweave._runtime.claims import Technique, claims_on, holders_of
from gradweave._runtime.composition import refuse_conflicts
from gradweave._runtime.fused_updates import updated_in_forward
from gradweave._runtime.requirements import refuse_compiled, refuse_copies, refuse_sharded
from gradweave.errors import ArgumentError, UnsupportedError


def check_model(model: nn.Sequential, ranks: int) -> list[tuple[str, nn.Module]]:
    """Return the layers, by name, of a model that is to be spread over ranks; raise if it cannot be."""
    if not isinstance(model, nn.Sequential):
        raise ArgumentError("model", type(model).__name__, "give an nn.Sequential of the layers, in order")
    refuse_conflicts(Technique.PIPELINE, model=model)
    for optimizer in holders_of(model, Technique.EVA) if ranks > 1 else ():
        raise UnsupportedError(
            f"a model that has an optimizer {type(optimizer).__name__}",
            f"it was made for all layers, which come to {ranks} ranks",
            "make it after the pipeline, for its .module",
        )
    layers = list(model.named_children())
    if len(layers) != len(model):
        raise UnsupportedError(
            f"a model of {len(model)} layers", "one of them is in it twice", "share its weights, not the module"
        )
    for name, layer in layers:
        refuse_compiled(layer, remedy=f"give the plain layer {name}: compiled code cannot be split")
        if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in layer.modules()):
            raise UnsupportedError("DistributedDataParallel", "a layer has no replicas", "give the plain layers")
    refuse_copies(model)
    refuse_sharded(model, remedy="give plain layers")
    return layers


def device_of(layers: list[tuple[str, nn.Module]]) -> torch.device:
    """Return the device of a model before its layers are dealt out."""
    return next((p.device for _, layer in layers for p in layer.parameters()), torch.device("cpu"))


def check_layers(module: nn.Module, device: torch.device | None) -> torch.device:
    """Return the one device of a rank's layers; raise UnsupportedError if there are several."""
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        raise UnsupportedError(
            f"layers on {len(devices)} devices", "a rank computes on one", "give device= for this rank's layers"
        )
    found = devices.pop() if devices else device or torch.device("cpu")
    if found.type == "meta":
        raise UnsupportedError("layers on the meta device", "they have no data", "give layers with weights")
    return found


def check_parameters(module: nn.Module) -> None:
    """Raise UnsupportedError for a fusion that would update weights while other micro-batches still need them."""
    in_forward = updated_in_forward(module)
    if any(not claim.params <= in_forward for claim in claims_on(module, Technique.FUSE)):
        raise UnsupportedError(
            "a fusion that may update in backward",
            "it would update weights after the first micro-batch",
            'use fuse(..., mode="forward")',
        )


class BatchShapes:
    """Check that every batch has the shape of the first one, for which the buffers between stages are made.

    Args:
        microbatches: Number of parts that batches are cut into.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._seen: dict[str, Any] = {}
        self._beside: dict[str, str] = {}

    def is_odd(self, **given: Any) -> bool:
        """Return whether arguments that this rank does not need have another shape than the first ones.

        The ranks that need them see the same, and refuse the batch.
        """
        shapes = {name: repr(flat_shapes(value)) for name, value in given.items() if value is not None}
        return any(self._beside.setdefault(name, shape) != shape for name, shape in shapes.items())

    def inputs(self, value: Any) -> tuple[torch.Tensor, ...]:
        """Return the inputs of the first stage; raise ArgumentError for what cannot be cut into micro-batches."""
        values = value if isinstance(value, (tuple, list)) else (value,)
        if not values or not all(isinstance(one, torch.Tensor) for one in values):
            raise ArgumentError("inputs", _shown(value), "give a tensor, or a tuple of tensors, on this rank")
        for one in values:
            self._check("inputs", one)
        self._same("inputs", [(tuple(one.shape), one.dtype) for one in values])
        return tuple(values)

    def target(self, value: Any) -> torch.Tensor:
        """Return the target of the last stage; raise ArgumentError for what cannot be cut into micro-batches."""
        if not isinstance(value, torch.Tensor):
            raise ArgumentError("target", _shown(value), "give a tensor on this rank: it has the last stage")
        self._check("target", value)
        self._same("target", [(tuple(value.shape), value.dtype)])
        return value

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 0 or tensor.shape[0] % self._microbatches or not tensor.shape[0]:
            remedy = f"the first dimension must be a multiple of the {self._microbatches} micro-batches"
            raise ArgumentError(name, tuple(tensor.shape), remedy)

    def _same(self, name: str, shapes: list[Any]) -> None:
        first = self._seen.setdefault(name, shapes)
        if shapes != first:
            was = ", ".join(f"{shape} of {dtype}" for shape, dtype in first)
            remedy = f"was {was} in the first step, and cannot change; leave the last, smaller batch out (drop_last)"
            raise ArgumentError(name, ", ".join(f"{shape} of {dtype}" for shape, dtype in shapes), remedy)


def flat_shapes(value: Any) -> list[Any]:
    """Return the shapes and types of all tensors in nested containers."""
    return [(tuple(one.shape), one.dtype) for one in flat_leaves(value) if isinstance(one, torch.Tensor)]


def _shown(value: Any) -> Any:
    return None if value is None else type(value).__name__
