"""A pipeline with all of its stages in one process, taken like a whole step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave.parallel.pipeline import Pipeline
from gradweave.schedule.tasks import Kind

MICROBATCHES = 2


class PipedStep:
    """Takes training steps in micro-batches, as a rank of a pipeline does; one process has nobody to wait for.

    Args:
        model: An ``nn.Sequential``.
        optimizer: Of its parameters.
        objective: Called with a model and a batch, gives a loss.
        max_norm: What gradients are clipped to.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        objective: Callable[..., torch.Tensor],
        max_norm: float | None,
    ) -> None:
        device = next(model.parameters()).device
        self._is_host = not dist.is_initialized()
        if self._is_host:
            backend = "nccl" if device.type == "cuda" else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        self._optimizer, self._max_norm = optimizer, max_norm
        self._mark: Callable[[Kind], AbstractContextManager[None]] | None = None
        try:
            self._pipe = Pipeline(
                model,  # type: ignore[arg-type]
                lambda output, target: objective(nn.Identity(), output, target),
                microbatches=MICROBATCHES,
                policy="fast_forward",
                device=device,
            )
        except BaseException:
            self._leave()
            raise

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Takes a step; returns the mean of the micro-batches' losses."""
        with self._part(Kind.X):
            loss: Any = self._pipe.step(x, y)
        with self._part(Kind.U):
            if self._max_norm is not None:
                self._pipe.clip_grad_norm_(self._max_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
        taken: torch.Tensor = loss.detach()
        return taken

    def record(self, mark: Callable[[Kind], AbstractContextManager[None]] | None) -> None:
        """Lets a recorder see forward and backward, which are one here, and the update."""
        self._mark = mark

    def close(self) -> None:
        """Ends the pipeline."""
        self._pipe.close()
        self._leave()

    def _part(self, kind: Kind) -> AbstractContextManager[None]:
        return nullcontext() if self._mark is None else self._mark(kind)

    def _leave(self) -> None:
        if self._is_host and dist.is_initialized():
            dist.destroy_process_group()
