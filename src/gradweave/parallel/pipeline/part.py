"""What a pipeline tells the optimizers of its ranks: they update parts of one model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from gradweave._runtime.claims import PipelinePart, Technique, claim_model
from gradweave.errors import GradweaveError
from gradweave.parallel.pipeline.process_group import PipelinePeers

_PATIENCE = timedelta(seconds=30)
"""For an optimizer that another rank has not made yet; usually all have, before the step whose gradients they use."""


class Mark:
    """The marks on this rank's layers, until the pipeline is closed.

    Args:
        layers: Of the whole model.
        own: Those on this rank.
        tied: Parameters of this rank that other ranks have too.
        peers: The ranks.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        own: Sequence[nn.Module],
        tied: Sequence[nn.Parameter],
        peers: PipelinePeers,
    ) -> None:
        modules = [module for _, layer in layers for module in layer.modules()]
        linears = [module for module in modules if isinstance(module, nn.Linear)]
        here = {id(module) for layer in own for module in layer.modules()}
        self._peers: PipelinePeers | None = peers
        self._optimizers = 0
        self._complete: set[str] = set()
        part = PipelinePart(
            peers.size,
            frozenset(map(id, tied)),
            frozenset(tuple(module.weight.shape) for module in modules if isinstance(module, nn.Embedding)),
            bool(linears) and id(linears[-1]) in here,
            self._enlist,
            self._all_agree,
        )
        self._claims = ExitStack()
        for layer in own:
            claim_model(layer, Technique.PIPELINE, self, self._claims, detail=part)

    def remove(self) -> None:
        """Takes the marks off the layers; optimizers decide by themselves from here on."""
        self._claims.close()
        self._peers = None

    def _enlist(self) -> str:
        name = f"optimizer-{self._optimizers}"
        self._optimizers += 1
        if self._peers is not None:
            self._peers.note(f"{name}-{self._peers.rank}")
        return name

    def _all_agree(self, name: str, flag: torch.Tensor) -> torch.Tensor:
        peers = self._peers
        if peers is None:
            return flag
        if name not in self._complete:
            self._wait_for_others(name, peers)
        opposed = (~flag).to(torch.float32).reshape(1)
        dist.all_reduce(opposed, dist.ReduceOp.MAX, group=peers.group)
        return (opposed == 0).reshape(flag.shape)

    def _wait_for_others(self, name: str, peers: PipelinePeers) -> None:
        missing = peers.missing([f"{name}-{rank}" for rank in range(peers.size)], _PATIENCE)
        if missing:
            raise GradweaveError(
                f"rank {missing[0]} of the pipeline has no optimizer of this kind, and all ranks decide together "
                "whether a step is taken: make one of the same kind on each rank, before the first step"
            )
        self._complete.add(name)
