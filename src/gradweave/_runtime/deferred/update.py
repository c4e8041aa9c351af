"""An update that step() has decided and that is done later."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from gradweave._runtime.buckets import Bucket
from gradweave._runtime.deferred.late import LateGradient
from gradweave._runtime.optimizer_steps.partial import BegunStep, FrozenStep


@dataclass
class Update:
    """An update that step() has decided and that has not been seen yet.

    Attributes:
        bucket: What it updates.
        grads: With what; kept until the update is visible.
        frozen: How, where it has not run yet, or numbers that it reads might change until it has.
        event: The end of it, where it runs on a second stream.
        stream: The stream that the gradients were made on.
        late: Those of the gradients that were not finished at step().
        shown: What is seen of the gradients until it is done.
        is_running: Whether it is being done.
    """

    bucket: Bucket
    grads: list[torch.Tensor]
    frozen: FrozenStep | BegunStep | None = None
    event: torch.cuda.Event | None = None
    stream: torch.cuda.Stream | None = None
    late: list[LateGradient] = field(default_factory=list)
    shown: list[torch.Tensor] = field(default_factory=list)
    is_running: bool = False


def await_late(update: Update) -> None:
    """Lets the current stream, and no other, wait for gradients that are still being computed."""
    for position, (p, grad) in enumerate(zip(update.bucket.params, update.grads, strict=True)):
        if type(grad) is LateGradient:
            update.late.append(grad)
            p.grad = update.grads[position] = grad.source.ready()


def restrict(bucket: Bucket, grads: dict[nn.Parameter, torch.Tensor], number: int | None = None) -> Bucket:
    """The part of a bucket that has the given gradients."""
    groups = {index: [p for p in params if p in grads] for index, params in bucket.groups.items()}
    number = bucket.number if number is None else number
    return Bucket(number, tuple(grads), {index: params for index, params in groups.items() if params})
