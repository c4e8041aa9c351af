"""Who holds a model and an optimizer: each attachment claims what it changes, and lets go of it when it detaches.

A claim on a model is a hook on each of its layers, so that a technique that is given the layer, a part of it or
something around it finds the claim. It is a hook on loading a state dict, which costs nothing in training, and a copy
of the layer does not have it: a copy is a stock model. :mod:`gradweave._runtime.composition` says what may be claimed
twice, and by which techniques.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.modules import load_hooks
from gradweave._runtime.module_hook import ModuleHook

_CLAIMS = "_gradweave_claims"


class Technique(StrEnum):
    """What can hold a model or an optimizer; the value is the name that its user calls."""

    FUSE = "fuse"
    COMPILE = "compile"
    REORDER = "reorder"
    DASO = "DASO"
    DATA_PARALLEL = "DataParallel"
    PIPELINE = "Pipeline"
    EVA = "Eva"


@dataclass(frozen=True, eq=False)
class Claim:
    """One attachment's hold on a layer, or on an optimizer.

    Attributes:
        technique: What the attachment does.
        find_holder: Return the attachment; None once it is gone.
        params: Ids of the layer's parameters that it concerns; all trained ones for an optimizer.
        detail: What other techniques must know of it, such as a :class:`PipelinePart`.
    """

    technique: Technique
    find_holder: Callable[[], Any]
    params: frozenset[int] = frozenset()
    detail: Any = None

    @property
    def holder(self) -> Any:
        """The attachment; None once it is gone."""
        return self.find_holder()


class ClaimHook(ModuleHook):
    """The hook by which a layer carries a claim; the copy of a layer carries none."""

    def __init__(self, claim: Claim | None = None) -> None:
        super().__init__()
        self.claim = claim

    def __deepcopy__(self, _: object) -> ClaimHook:
        return ClaimHook()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


def claim_model(
    model: nn.Module,
    technique: Technique,
    holder: object,
    undo: ExitStack,
    *,
    params: frozenset[int] | None = None,
    detail: Any = None,
) -> None:
    """Claim the layers of a model that have parameters, and the model itself.

    Args:
        model: The model.
        technique: What claims it.
        holder: The attachment; it is not kept alive.
        undo: Withdraws the claim when it is closed.
        params: Ids of the parameters that are claimed, and only layers that have one of them; None for all.
        detail: What other techniques must know.
    """
    find_holder = weakref.ref(holder)
    for layer in model.modules():
        if isinstance(layer, torch.jit.ScriptModule):  # takes no hook: its owner carries the claim
            continue
        scripted = [child for child in layer.children() if isinstance(child, torch.jit.ScriptModule)]
        own = {*map(id, layer.parameters(recurse=False)), *(id(p) for child in scripted for p in child.parameters())}
        claimed = frozenset(own if params is None else own & params)
        if claimed or (params is None and layer is model):
            hook = ClaimHook(Claim(technique, find_holder, claimed, detail))
            undo.callback(layer.register_load_state_dict_post_hook(hook).remove)


def claim_optimizer(
    optimizer: Optimizer, technique: Technique, holder: object, undo: ExitStack, *, keep_alive: bool = False
) -> None:
    """Claim an optimizer.

    Args:
        optimizer: The optimizer.
        technique: What claims it.
        holder: The attachment.
        undo: Withdraws the claim when it is closed.
        keep_alive: Whether the attachment lives as long as the optimizer, though its user dropped it.
    """
    claim = Claim(technique, (lambda: holder) if keep_alive else weakref.ref(holder))
    setattr(optimizer, _CLAIMS, [*claims_on(optimizer), claim])
    undo.callback(_withdraw, optimizer, claim)


def _withdraw(optimizer: Optimizer, claim: Claim) -> None:
    remaining = [other for other in getattr(optimizer, _CLAIMS, []) if other is not claim]
    if remaining:
        setattr(optimizer, _CLAIMS, remaining)
    elif hasattr(optimizer, _CLAIMS):
        delattr(optimizer, _CLAIMS)


def claims_on(target: nn.Module | Optimizer, technique: Technique | None = None) -> list[Claim]:
    """Return the claims on any layer of a model, or on an optimizer, whose attachments are still there.

    Args:
        target: The model or the optimizer.
        technique: Leave out the claims of others; None for all.
    """
    claims = getattr(target, _CLAIMS, []) if isinstance(target, Optimizer) else _claims_on_layers(target)
    # An attachment may be gone without having been detached.
    return [claim for claim in claims if technique in (None, claim.technique) and claim.holder is not None]


def _claims_on_layers(model: nn.Module) -> Iterator[Claim]:
    for layer in model.modules():
        for hook in load_hooks(layer):
            if isinstance(hook, ClaimHook) and hook.claim is not None:
                yield hook.claim


def holders_of(target: nn.Module | Optimizer, technique: Technique) -> list[Any]:
    """Return the attachments of one technique that hold a model, a part of it, or an optimizer; each once."""
    holders = [claim.holder for claim in claims_on(target, technique)]
    return list({id(holder): holder for holder in holders if holder is not None}.values())


def is_claimed(target: nn.Module | Optimizer, technique: Technique) -> bool:
    """Return whether a technique holds any layer of a model, or an optimizer."""
    return bool(claims_on(target, technique))


@dataclass(frozen=True, eq=False)
class PipelinePart:
    """What an optimizer of layers must know of a model that is spread over the ranks of a pipeline.

    Attributes:
        ranks: Number of ranks.
        tied: Ids of parameters that other ranks have too.
        embeddings: Shapes of the weights of all embeddings, on any rank.
        has_last_linear: Whether the model's last linear layer is on this rank.
        enlist: Announce, without waiting, that an optimizer of this rank will ask the others; returns its name.
        all_agree: Return whether a flag is set on all ranks; optimizers of that name ask at the same point.
        replicas: Return the ranks that have these layers in other pipelines; None if there are none.
    """

    ranks: int
    tied: frozenset[int]
    embeddings: frozenset[tuple[int, ...]]
    has_last_linear: bool
    enlist: Callable[[], str]
    all_agree: Callable[[str, torch.Tensor], torch.Tensor]
    replicas: Callable[[], Any] = lambda: None


def pipeline_part(model: nn.Module) -> PipelinePart | None:
    """Return the part of a pipeline that a model, or a layer of it, is; None if it is in none."""
    return next((claim.detail for claim in claims_on(model, Technique.PIPELINE)), None)
