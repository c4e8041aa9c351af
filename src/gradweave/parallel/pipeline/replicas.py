"""Replicas of a pipeline: ranks that have the same stages, and average their gradients."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import nn

from gradweave._runtime.buckets import MESSAGE_BYTES, message_params, params_by_layer
from gradweave._runtime.peers.gradient_messages import GradientMessages
from gradweave._runtime.peers.groups import check_group_counts, close_connections, common_name, end_group, new_group
from gradweave._runtime.peers.lockstep import Changes
from gradweave._runtime.peers.replica_state import BufferBroadcast, broadcast_state
from gradweave._runtime.peers.same_on_ranks import (
    describe_buffers,
    describe_layouts,
    describe_parameters,
    same_on_ranks,
)
from gradweave._runtime.replicas import Replicas

_TECHNIQUE = "Pipeline"


class StageReplicas:
    """The ranks that have the stages of this one, each in a pipeline of its own.

    They talk in a group that is not the user's: a rank whose pipeline stops leaves it, and the others, which may be
    waiting for its gradients, stop too.

    Args:
        module: This rank's layers; weights and buffers become those of the group's first rank.
        group: The ranks.
        plan: What was planned, which must be the same for all.
        timeout: Seconds after which waiting for another rank is an error; None for torch's default.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, *, plan: str, timeout: float | None) -> None:
        self._module = module
        with same_on_ranks(group, technique=_TECHNIQUE) as facts:
            facts["the plan"] = plan
            facts |= describe_parameters(module.named_parameters(remove_duplicate=False))
            facts |= describe_layouts(module.named_parameters())
            facts |= describe_buffers(module.named_buffers())
        check_group_counts([group], technique="a pipeline with replicas")
        limit = None if timeout is None else timedelta(seconds=timeout)
        group = new_group([dist.get_process_group_ranks(group)], made_by_all=False, timeout=limit)
        self._group: dist.ProcessGroup | None = group
        self._ranks = dist.get_process_group_ranks(group)
        self._changes = Changes(
            common_name("gradweave-pipeline-replicas", group), technique=_TECHNIQUE, timeout=timeout
        )
        self._buffers = BufferBroadcast(module, group)
        self._check = Replicas(lambda: [*module.named_parameters()], group, of=_TECHNIQUE)
        self._trained: list[nn.Parameter] = []
        self._messages = GradientMessages((), group)
        broadcast_state((*module.parameters(), *module.buffers()), group)
        self._plan_messages()

    def begin_step(self) -> None:
        """Take over the first replica's buffers, and agree on what is trained if that has changed."""
        trained = self._trained_now()
        if len(trained) != len(self._trained) or any(p is not q for p, q in zip(trained, self._trained, strict=True)):
            known = set(map(id, trained))
            numbers = ",".join(str(n) for n, p in enumerate(self._module.parameters()) if id(p) in known)
            self._changes.agree("which parameters are trained has changed", numbers, self._ranks)
            self._plan_messages()
        self._check.check_now_and_then()
        self._buffers.run()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks; None once the group is left."""
        return self._group

    def average(self) -> None:
        """Average all gradients; those that were averaged before are the same on all ranks, and stay what they are."""
        self._messages.average()

    def leave(self) -> None:
        """Close this rank's connections to the replicas, which fail where they wait for it."""
        if self._group is not None:
            close_connections(self._group)
            self._group = None

    def close(self) -> None:
        """End the group, once the pipeline is done."""
        if self._group is not None:
            end_group(self._group)
            self._group = None

    def _trained_now(self) -> list[nn.Parameter]:
        """Return what may be updated: a layer that was frozen may have gradients of an earlier micro-batch."""
        return [p for p in self._module.parameters() if p.requires_grad or p.grad is not None]

    def _plan_messages(self) -> None:
        """Make messages of whole layers, from the last to the first."""
        self._trained = self._trained_now()
        layers = params_by_layer(self._module, self._trained)
        if self._group is not None:
            self._messages = GradientMessages(message_params(layers, 0, MESSAGE_BYTES), self._group)
