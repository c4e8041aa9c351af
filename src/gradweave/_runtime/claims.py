"""How one technique tells another that it is at work on an optimizer, or on a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.eager import load_hooks
from gradweave._runtime.module_hook import ModuleHook
from gradweave.errors import ArgumentError

_FUSED = "_gradweave_fusion"
_COMPILED = "_gradweave_compiled_step"
_DASO = "_gradweave_daso"
_DATA_PARALLEL = "_gradweave_data_parallel"


def check_is_module(model: object) -> None:
    """Raises for what is not a model; a :class:`~gradweave.Pipeline`, which has one in its ``module``, for example."""
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "give an nn.Module")


def mark_fused(optimizer: Optimizer, fusion: object | None) -> None:
    """Notes on an optimizer that a fusion has its updates done; None that it no longer does."""
    if fusion is not None:
        setattr(optimizer, _FUSED, fusion)
    elif hasattr(optimizer, _FUSED):
        delattr(optimizer, _FUSED)


def is_in_fusion(optimizer: Optimizer) -> bool:
    """Whether a fusion is attached to an optimizer."""
    return getattr(optimizer, _FUSED, None) is not None


def mark_compiled(optimizer: Optimizer, step: object) -> None:
    """Notes on an optimizer that a compiled step updates its parameters, for as long as that lives."""
    setattr(optimizer, _COMPILED, weakref.ref(step))


def is_in_compiled_step(optimizer: Optimizer) -> bool:
    """Whether a compiled step that is still there updates this optimizer's parameters."""
    note = getattr(optimizer, _COMPILED, None)
    return note is not None and note() is not None


def mark_daso(optimizer: Optimizer, daso: object | None) -> None:
    """Notes on an optimizer that DASO exchanges what it updates; None that it no longer does."""
    setattr(optimizer, _DASO, None if daso is None else weakref.ref(daso))


def is_in_daso(optimizer: Optimizer) -> bool:
    """Whether a DASO that is still there is attached to an optimizer."""
    note = getattr(optimizer, _DASO, None)
    return note is not None and note() is not None


def mark_data_parallel(optimizer: Optimizer, wrapper: object | None) -> None:
    """Notes on an optimizer that a DataParallel defers its updates; None that it no longer does."""
    setattr(optimizer, _DATA_PARALLEL, None if wrapper is None else weakref.ref(wrapper))


def is_in_data_parallel(optimizer: Optimizer) -> bool:
    """Whether a DataParallel that is still there has this optimizer."""
    note = getattr(optimizer, _DATA_PARALLEL, None)
    return note is not None and note() is not None


def _layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that have parameters of their own, and take hooks."""
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    return [module for module in modules if next(module.parameters(recurse=False), None) is not None]


class ParallelMark(ModuleHook):
    """A hook on loading by which a layer says what trains replicas of it; a copy of the layer does not have it.

    Args:
        by: The technique, ``"DASO"`` or ``"DataParallel"``.
    """

    def __init__(self, by: str | None = None) -> None:
        super().__init__()
        self.by = by

    def __deepcopy__(self, _: object) -> ParallelMark:
        return ParallelMark()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


def mark_in_parallel(model: nn.Module, by: str, undo: ExitStack) -> None:
    """Notes on all layers of a model what trains replicas of it, until ``undo`` is closed."""
    for layer in _layers(model):
        undo.callback(layer.register_load_state_dict_post_hook(ParallelMark(by)).remove)


def trained_in_parallel_by(model: nn.Module) -> set[str]:
    """Which techniques train replicas of a model, or of a part of it."""
    hooks = (hook for module in model.modules() for hook in load_hooks(module))
    return {hook.by for hook in hooks if isinstance(hook, ParallelMark) and hook.by is not None}


class OptimizerMark(ModuleHook):
    """A hook on loading by which a layer says which optimizer was made for the whole model that it is in.

    Args:
        optimizer: Not kept alive by this; a copy of the layer has none.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        super().__init__()
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    @property
    def name(self) -> str | None:
        """Its class; None if it is gone."""
        optimizer = None if self._optimizer is None else self._optimizer()
        return None if optimizer is None else type(optimizer).__name__

    def __deepcopy__(self, _: object) -> OptimizerMark:
        return OptimizerMark()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


def mark_layers_of(model: nn.Module, optimizer: Optimizer) -> None:
    """Notes on all layers of a model that an optimizer treats them as the layers of a whole model."""
    for layer in _layers(model):
        handle = layer.register_load_state_dict_post_hook(OptimizerMark(optimizer))
        weakref.finalize(optimizer, handle.remove).atexit = False


def optimizers_of_layers(model: nn.Module) -> set[str]:
    """The classes of optimizers that treat layers of a model as those of a whole model."""
    hooks = (hook for module in model.modules() for hook in load_hooks(module))
    return {hook.name for hook in hooks if isinstance(hook, OptimizerMark) and hook.name is not None}


def check_not_in_pipeline(model: nn.Module) -> None:
    """Raises for a model, or a part of one, whose layers are spread over ranks: those have nothing to average."""
    if pipeline_part(model) is not None:
        raise ArgumentError("model", "layers of a Pipeline", "each rank has others of them; close() it first")


@dataclass(frozen=True, eq=False)
class PipelinePart:
    """What of a model that is spread over ranks is on this one, as far as an optimizer of layers must know.

    Attributes:
        ranks: How many there are.
        tied: The ids of parameters that other ranks have too.
        embeddings: The shapes of all embeddings' weights, on whichever rank.
        has_last_linear: Whether the model's last linear layer is here.
        enlist: Says without waiting that an optimizer of this rank will ask the others; returns by which name.
        all_agree: Whether a flag is set on all ranks, on which optimizers of that name ask at the same point.
    """

    ranks: int
    tied: frozenset[int]
    embeddings: frozenset[tuple[int, ...]]
    has_last_linear: bool
    enlist: Callable[[], str]
    all_agree: Callable[[str, torch.Tensor], torch.Tensor]


class PipelineMark(ModuleHook):
    """A hook on loading by which a layer says that it is in a pipeline; a copy of the layer is not."""

    def __init__(self, part: PipelinePart | None = None) -> None:
        super().__init__()
        self.part = part

    def __deepcopy__(self, _: object) -> PipelineMark:
        return PipelineMark()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


def pipeline_part(model: nn.Module) -> PipelinePart | None:
    """What a model, or a layer of it, is in a pipeline's; None if it is in none."""
    hooks = (hook for module in model.modules() for hook in load_hooks(module))
    return next((hook.part for hook in hooks if isinstance(hook, PipelineMark) and hook.part is not None), None)
