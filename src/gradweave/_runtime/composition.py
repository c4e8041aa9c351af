"""What works together, as data: the refusals at run time and docs/composition.md come from these tables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from gradweave._runtime.claims import Technique, is_claimed
from gradweave.errors import UnsupportedError


class Verdict(Enum):
    """Whether two techniques work together; the value is the sign in the docs."""

    WORKS = "✓"
    CONDITIONAL = "◐"
    REFUSED = "✗"
    NOT_PROVIDED = "-"


@dataclass(frozen=True)
class Rule:
    """What happens when a technique is attached to what another one holds.

    Attributes:
        verdict: Whether that works.
        note: The condition, or what it means, for the docs.
        on: Where the other one's claim counts: ``"optimizer"``, ``"model"``, or ``"either"``.
        reason: Why it is refused, as a predicate of the model or the optimizer.
        remedy: What to do instead.
    """

    verdict: Verdict
    note: str = ""
    on: Literal["optimizer", "model", "either"] = "either"
    reason: str = ""
    remedy: str = "detach() that first"


def _refused(
    reason: str, remedy: str = "detach() that first", *, on: Literal["optimizer", "model", "either"], note: str = ""
) -> Rule:
    return Rule(Verdict.REFUSED, note, on, reason, remedy)


_FUSE, _COMPILE, _REORDER = Technique.FUSE, Technique.COMPILE, Technique.REORDER
_DASO, _DATA_PARALLEL, _PIPELINE, _EVA = Technique.DASO, Technique.DATA_PARALLEL, Technique.PIPELINE, Technique.EVA
_WORKS = Rule(Verdict.WORKS)
_SPREAD = "is part of a Pipeline, whose ranks hold different layers"
_CLOSE = "close() that first"
_MESH = "give compile() the plain model and mesh=: a compiled step averages by itself"
_REPLICAS = "give Pipeline replicas=: it averages over pipelines by itself"
_VECTORS = "on several ranks with `mesh=`, which averages vectors, too"

COMPOSITION: dict[tuple[Technique, Technique], Rule] = {
    # (what is attached already, what is attached next)
    (_FUSE, _FUSE): Rule(
        Verdict.CONDITIONAL,
        "two optimizers over different parameters of one model; the same optimizer or parameters twice are refused",
    ),
    (_FUSE, _COMPILE): _refused("is fused, and compile() does the same by itself", on="model"),
    (_FUSE, _REORDER): Rule(
        Verdict.CONDITIONAL,
        "updates of backward-fusion follow their gradients; `cross_step` needs forward-fusion, without it, it raises",
    ),
    (_FUSE, _DASO): _refused("is fused, so that updates would come before averages", on="model"),
    (_FUSE, _DATA_PARALLEL): _refused("is fused, and DataParallel defers updates by itself", on="model"),
    (_FUSE, _PIPELINE): Rule(Verdict.CONDITIONAL, 'mode="forward"; backward raises'),
    (_FUSE, _EVA): Rule(
        Verdict.CONDITIONAL, 'mode="forward", and mode="auto" without `allow_backward`; backward raises'
    ),
    (_COMPILE, _FUSE): _refused(
        "is part of a compiled step, which fuses its updates already", "drop that step first", on="optimizer"
    ),
    (_COMPILE, _COMPILE): Rule(Verdict.WORKS, "two steps on two optimizers of one model"),
    (_COMPILE, _REORDER): Rule(
        Verdict.CONDITIONAL, "a compiled step keeps its own order; `compile(costs=)` reorders inside its graph"
    ),
    (_COMPILE, _DASO): _refused("is part of a compiled step", "drop that step first", on="optimizer"),
    (_COMPILE, _DATA_PARALLEL): _refused("is part of a compiled step", _MESH, on="optimizer"),
    (_COMPILE, _PIPELINE): _refused("is part of a compiled step", "drop that step first", on="model"),
    (_COMPILE, _EVA): Rule(Verdict.WORKS, _VECTORS),
    (_REORDER, _FUSE): _WORKS,
    (_REORDER, _COMPILE): _refused("is reordered, and hooks are no part of a graph", on="model"),
    (_REORDER, _REORDER): _refused("is reordered already", on="model"),
    (_REORDER, _DASO): _WORKS,
    (_REORDER, _DATA_PARALLEL): _refused("is reordered, and DataParallel reorders by itself", on="model"),
    (_REORDER, _PIPELINE): _refused("is reordered, and a pipeline's schedule orders its gradients", on="model"),
    (_REORDER, _EVA): _WORKS,
    (_DASO, _FUSE): _refused("has a DASO, which averages before updates", on="optimizer"),
    (_DASO, _COMPILE): _refused("has a DASO, which a graph would run without", on="optimizer"),
    (_DASO, _REORDER): _WORKS,
    (_DASO, _DASO): _refused("has a DASO already", "finish() or detach() that first", on="optimizer"),
    (_DASO, _DATA_PARALLEL): _refused("has a DASO, which averages by itself", on="either"),
    (_DASO, _PIPELINE): _refused("has a DASO, and a pipeline's layers have no replicas to average", on="model"),
    (_DASO, _EVA): Rule(
        Verdict.CONDITIONAL, "vectors are averaged over the node; a `process_group=` of other ranks raises"
    ),
    (_DATA_PARALLEL, _FUSE): _refused("is in a DataParallel, which defers its updates", on="optimizer"),
    (_DATA_PARALLEL, _COMPILE): _refused(
        "is in a DataParallel, which averages outside of a graph", _MESH, on="optimizer"
    ),
    (_DATA_PARALLEL, _REORDER): _refused("is in a DataParallel, which orders weight gradients by itself", on="model"),
    (_DATA_PARALLEL, _DASO): _refused("is in a DataParallel, which averages over all ranks", on="either"),
    (_DATA_PARALLEL, _DATA_PARALLEL): _refused("is in a DataParallel already", on="optimizer"),
    (_DATA_PARALLEL, _PIPELINE): _refused(
        "is in a DataParallel, which other layers have no part in", _REPLICAS, on="model"
    ),
    (_DATA_PARALLEL, _EVA): Rule(Verdict.REFUSED, "its optimizer comes with it, so that it cannot be made later"),
    (_PIPELINE, _FUSE): Rule(Verdict.CONDITIONAL, 'mode="forward"; backward raises in the first step'),
    (_PIPELINE, _COMPILE): _refused(_SPREAD, _CLOSE, on="model"),
    (_PIPELINE, _REORDER): _refused(_SPREAD, _CLOSE, on="model"),
    (_PIPELINE, _DASO): _refused(_SPREAD, _CLOSE, on="model"),
    (_PIPELINE, _DATA_PARALLEL): _refused(_SPREAD, _REPLICAS, on="model"),
    (_PIPELINE, _PIPELINE): Rule(Verdict.WORKS, "two on the same layers add up their gradients"),
    (_PIPELINE, _EVA): Rule(
        Verdict.CONDITIONAL, "on any number of ranks, as on the whole model; scales over all layers raise"
    ),
    (_EVA, _FUSE): Rule(
        Verdict.CONDITIONAL, 'mode="forward", and mode="auto" without `allow_backward`; backward raises'
    ),
    (_EVA, _COMPILE): Rule(Verdict.WORKS, _VECTORS),
    (_EVA, _REORDER): _WORKS,
    (_EVA, _DASO): Rule(
        Verdict.CONDITIONAL, "vectors are averaged over the node; a `process_group=` of other ranks raises"
    ),
    (_EVA, _DATA_PARALLEL): _refused(
        "decides over all gradients at once, and DataParallel updates in parts",
        "use DistributedDataParallel",
        on="optimizer",
    ),
    (_EVA, _PIPELINE): Rule(
        Verdict.CONDITIONAL, "on one rank; an optimizer that was made for all layers is refused on several"
    ),
    (_EVA, _EVA): Rule(Verdict.WORKS, "two on two parts of a model"),
}
"""By what is attached already and what is attached next. A refusal without a reason is made by the technique's own
checks, as every condition is."""


def refuse_conflicts(newcomer: Technique, *, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Raise UnsupportedError if another attachment holds the model or the optimizer and the two do not compose.

    Args:
        newcomer: The technique that is being attached.
        model: The model that it is given.
        optimizer: The optimizer that it is given; None if it takes none.
    """
    for held in Technique:
        rule = COMPOSITION[held, newcomer]
        if rule.verdict is not Verdict.REFUSED or not rule.reason:
            continue
        for target, places in ((optimizer, ("optimizer", "either")), (model, ("model", "either"))):
            if target is not None and rule.on in places and is_claimed(target, held):
                raise UnsupportedError(f"{newcomer} of {type(target).__name__}", f"it {rule.reason}", rule.remedy)


Column = Literal["fuse forward", "fuse backward", "compile", "reorder", "DASO", "DataParallel", "Pipeline", "Eva"]
_BEFORE_OR_AFTER = "in both orders, at the latest in the first forward"

WITH_TORCH: dict[str, dict[Column, Rule]] = {
    "DistributedDataParallel": {
        "fuse forward": _WORKS,
        "fuse backward": Rule(Verdict.REFUSED, "updates would come before averages"),
        "compile": Rule(Verdict.REFUSED, "give the model that it wraps, and its ranks as `mesh=`"),
        "reorder": Rule(Verdict.CONDITIONAL, "`cross_step` raises"),
        "DASO": Rule(Verdict.CONDITIONAL, f"inside the node, given wrapped; anything else raises, {_BEFORE_OR_AFTER}"),
        "DataParallel": Rule(Verdict.REFUSED, _BEFORE_OR_AFTER),
        "Pipeline": Rule(Verdict.REFUSED, "`Pipeline(replicas=)` averages over pipelines"),
        "Eva": Rule(Verdict.WORKS, "in every order; compiled steps on several ranks need `mesh=`"),
    },
    "FSDP2": {
        "fuse forward": Rule(Verdict.REFUSED),
        "fuse backward": Rule(Verdict.REFUSED),
        "compile": Rule(Verdict.REFUSED),
        "reorder": Rule(Verdict.REFUSED),
        "DASO": Rule(Verdict.REFUSED, _BEFORE_OR_AFTER),
        "DataParallel": Rule(Verdict.REFUSED, _BEFORE_OR_AFTER),
        "Pipeline": Rule(Verdict.REFUSED),
        "Eva": Rule(Verdict.REFUSED, "made before `fully_shard`, it trains nothing, as any optimizer that is"),
    },
    "a model under `torch.compile`": {
        "fuse forward": Rule(
            Verdict.CONDITIONAL, "compiled before; compiled later, it goes on in stock order with one warning"
        ),
        "fuse backward": Rule(Verdict.CONDITIONAL, "in both orders; a compiled `optimizer.step()` raises"),
        "compile": Rule(Verdict.WORKS, "it is traced as part of the step"),
        "reorder": Rule(Verdict.CONDITIONAL, "compiled before, it raises; compiled later, it runs in stock order"),
        "DASO": Rule(Verdict.WORKS, "in both orders"),
        "DataParallel": Rule(Verdict.CONDITIONAL, "compiled before, it raises; compiled later, it works"),
        "Pipeline": Rule(Verdict.REFUSED),
        "Eva": Rule(Verdict.CONDITIONAL, "compiled and run before the optimizer is made, it raises in the first step"),
    },
    "activation checkpointing": {
        "fuse forward": _WORKS,
        "fuse backward": Rule(Verdict.CONDITIONAL, "a weight that reentrant segments share raises"),
        "compile": _WORKS,
        "reorder": Rule(Verdict.WORKS, "layers inside stay in order"),
        "DASO": _WORKS,
        "DataParallel": _WORKS,
        "Pipeline": Rule(Verdict.CONDITIONAL, "`use_reentrant=True` raises in the first step"),
        "Eva": _WORKS,
    },
    "GradScaler": {
        "fuse forward": _WORKS,
        "fuse backward": Rule(Verdict.REFUSED, "updates come before the scaler's verdict"),
        "compile": _WORKS,
        "reorder": _WORKS,
        "DASO": _WORKS,
        "DataParallel": _WORKS,
        "Pipeline": Rule(Verdict.NOT_PROVIDED, "`step(loss_factor=)` is there"),
        "Eva": Rule(Verdict.CONDITIONAL, "with absolute damping not after `unscale_()`"),
    },
    "clipping": {
        "fuse forward": _WORKS,
        "fuse backward": Rule(Verdict.REFUSED, "updates come before the norm is known"),
        "compile": _WORKS,
        "reorder": _WORKS,
        "DASO": _WORKS,
        "DataParallel": _WORKS,
        "Pipeline": _WORKS,
        "Eva": _WORKS,
    },
    "Accelerate": {
        "fuse forward": Rule(Verdict.WORKS, "with what `prepare` returns"),
        "fuse backward": Rule(Verdict.WORKS, "with what `prepare` returns"),
        "compile": Rule(Verdict.WORKS, "the optimizer is unwrapped"),
        "reorder": Rule(Verdict.NOT_PROVIDED),
        "DASO": Rule(Verdict.CONDITIONAL, "prepare optimizer and data; a prepared model raises"),
        "DataParallel": Rule(Verdict.CONDITIONAL, "prepare optimizer and data; a prepared model raises"),
        "Pipeline": Rule(Verdict.NOT_PROVIDED),
        "Eva": Rule(Verdict.WORKS, "prepared before or after"),
    },
    "Lightning": {
        "fuse forward": Rule(Verdict.WORKS, "also with `self.optimizers()`"),
        "fuse backward": Rule(Verdict.WORKS, "also with `self.optimizers()`"),
        "compile": Rule(Verdict.CONDITIONAL, "the optimizer is unwrapped; there is no strategy"),
        "reorder": Rule(Verdict.NOT_PROVIDED),
        "DASO": Rule(
            Verdict.CONDITIONAL,
            'one device per Trainer; `strategy="ddp"` raises, unless it averages over the one node in DASO\'s place',
        ),
        "DataParallel": Rule(Verdict.CONDITIONAL, 'one device per Trainer; `strategy="ddp"` raises'),
        "Pipeline": Rule(Verdict.NOT_PROVIDED),
        "Eva": Rule(Verdict.WORKS, 'with `strategy="ddp"`, bf16-mixed and clipping'),
    },
}
"""What else is found around a training loop, for the docs; each technique's own checks act on it."""
