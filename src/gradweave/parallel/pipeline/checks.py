"""What a pipeline refuses before anybody waits for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradweave._compat.distributed import is_distributed_tensor
from gradweave._compat.eager import flat_leaves, is_compiled
from gradweave._runtime.claims import optimizers_of_layers, trained_in_parallel_by
from gradweave.errors import ArgumentError
from gradweave.fusion.api import is_fused, updated_in_forward
from gradweave.reordering.api import is_reordered


def check_model(model: nn.Sequential, ranks: int) -> list[tuple[str, nn.Module]]:
    """The layers of a model that is to be spread over ranks, by name."""
    if not isinstance(model, nn.Sequential):
        raise ArgumentError("model", type(model).__name__, "give an nn.Sequential of the layers, in order")
    for technique in trained_in_parallel_by(model):
        raise ArgumentError("model", f"a model that is in a {technique}", "detach() that first")
    for optimizer in optimizers_of_layers(model) if ranks > 1 else ():
        remedy = f"was made for all layers, which come to {ranks} ranks; make it behind the pipeline, for its .module"
        raise ArgumentError("model", f"a model that has an optimizer {optimizer}", remedy)
    layers = list(model.named_children())
    if len(layers) != len(model):
        raise ArgumentError("model", f"{len(model)} layers", "one is in it twice; share its weights, not the module")
    for name, layer in layers:
        for module in layer.modules():
            if is_compiled(module):
                raise ArgumentError("model", f"layer {name} is compiled", "cannot be split; give the plain layer")
            if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
                raise ArgumentError("model", type(module).__name__, "give the plain layers")
        if is_reordered(layer):
            raise ArgumentError("model", f"layer {name} is reordered", "detach() that first: the schedule orders it")
    if any(is_distributed_tensor(p) for p in model.parameters()):
        raise ArgumentError("model", "FSDP", "sharded parameters are not supported; give plain layers")
    return layers


def device_of(layers: list[tuple[str, nn.Module]]) -> torch.device:
    """Where a model is, before its layers are dealt out."""
    return next((p.device for _, layer in layers for p in layer.parameters()), torch.device("cpu"))


def check_layers(module: nn.Module, device: torch.device | None) -> torch.device:
    """The one device that a rank's layers are on."""
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        raise ArgumentError("model", f"layers on {len(devices)} devices", "give device= for this rank's layers")
    found = devices.pop() if devices else device or torch.device("cpu")
    if found.type == "meta":
        raise ArgumentError("model", "layers without data", "give layers with weights, not on the meta device")
    return found


def check_parameters(module: nn.Module) -> None:
    """Rejects a fusion that would update weights while other micro-batches still need them."""
    if not is_fused(module):
        return
    in_forward = updated_in_forward(module)
    for part in module.modules():
        own = {id(p) for p in part.parameters(recurse=False)}
        if own and is_fused(part) and own.isdisjoint(in_forward):
            raise ArgumentError(
                "model", "a fusion that may update in backward",
                'would update weights after the first micro-batch; use fuse(..., mode="forward")',
            )  # fmt: skip


class BatchShapes:
    """Sees to it that every batch has the shape of the first: buffers between stages have it.

    Args:
        microbatches: What batches are cut into.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._seen: dict[str, Any] = {}
        self._beside: dict[str, str] = {}

    def is_odd(self, **given: Any) -> bool:
        """Whether what is not needed here tells that the batch is of another shape, as those who need it will see."""
        shapes = {name: repr(flat_shapes(value)) for name, value in given.items() if value is not None}
        return any(self._beside.setdefault(name, shape) != shape for name, shape in shapes.items())

    def inputs(self, value: Any) -> tuple[torch.Tensor, ...]:
        """What the first stage is given."""
        values = value if isinstance(value, (tuple, list)) else (value,)
        if not values or not all(isinstance(one, torch.Tensor) for one in values):
            raise ArgumentError("inputs", _shown(value), "give a tensor, or a tuple of tensors, on this rank")
        for one in values:
            self._check("inputs", one)
        self._same("inputs", [(tuple(one.shape), one.dtype) for one in values])
        return tuple(values)

    def target(self, value: Any) -> torch.Tensor:
        """What the last stage's loss is given."""
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
    """The shapes and types of all tensors in nested containers."""
    return [(tuple(one.shape), one.dtype) for one in flat_leaves(value) if isinstance(one, torch.Tensor)]


def _shown(value: Any) -> Any:
    return None if value is None else type(value).__name__
