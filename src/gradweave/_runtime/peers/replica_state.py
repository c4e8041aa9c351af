"""Replicas that hold the same: weights and buffers of the first rank, and steps and weights compared on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradweave._runtime.peers.replica_messages import naming_lost_peers
from gradweave._runtime.replicas import Replicas, is_due, settings_of


def broadcast_state(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks the first rank's values of some tensors, which come in the same order on all ranks."""
    root = dist.get_global_rank(group, 0)
    with torch.no_grad(), naming_lost_peers("weights could not be shared"):
        for tensor in tensors:
            # A broadcast sends memory, not elements, and the layout may differ between ranks, as with channels last on
            # one of them: so a dense copy travels.
            dense = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(dense, root, group=group)
            tensor.copy_(dense)


class BufferBroadcast:
    """Gives all ranks the first rank's buffers before each forward, in one message per dtype.

    Args:
        model: The model that has the buffers.
        group: A group of its own, so that buffers do not queue up after gradients.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._model = model
        self._group = group
        self._root = dist.get_global_rank(group, 0)

    def run(self) -> None:
        """Take the first rank's buffers; all ranks call it together."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self._model.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad(), naming_lost_peers("buffers could not be shared"):
            for buffers in by_dtype.values():
                message = torch.cat([buffer.reshape(-1) for buffer in buffers])
                dist.broadcast(message, self._root, group=self._group)
                if dist.get_rank(self._group) > 0:
                    for buffer, part in zip(buffers, message.split([b.numel() for b in buffers]), strict=True):
                        # Through .data, which does not count as a change: an earlier forward of this step, whose
                        # backward is still to come, may have saved the buffer.
                        buffer.data.copy_(part.view(buffer.shape))


class ReplicaCheck:
    """Compares the number of steps that ranks have taken, and their weights after a step.

    Weights are compared as they were after the last step: before a backward they may differ for a good reason, as in a
    loop that looks for a sharper place around them, on each rank for itself.

    Args:
        model: The model that has the weights.
        optimizer: The optimizer that takes the steps.
        group: The ranks that train together.
        technique: What trains, as its user calls it.
        named: Return the parameters to compare, by name; None for the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        group: dist.ProcessGroup,
        *,
        technique: str,
        named: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None,
    ) -> None:
        named = named or model.named_parameters
        self._steps = 0
        self._rounds = 0
        self._wants_hashes, self._has_hashes = True, False
        self._replicas = Replicas(
            lambda: [(name, p) for name, p in named() if p.requires_grad],
            group,
            of=technique,
            facts=lambda: settings_of(optimizer),
        )

    @property
    def wants_weights(self) -> bool:
        """Whether the next step that is taken has its weights looked at."""
        return self._wants_hashes

    def step_taken(self) -> None:
        """Count a step of this rank, and hash its weights if the next comparison needs them."""
        self._steps += 1
        if self._wants_hashes:
            self._replicas.take()
            self._has_hashes = True

    def begin_round(self, *, is_unsettled: bool) -> None:
        """Count a round of gradients; compare before they are averaged, in the first round and once in a while.

        Args:
            is_unsettled: Compare now: the arrangement of steps may change, which all ranks must do at the same step.
        """
        this_round = self._rounds
        self._rounds += 1
        if is_unsettled or is_due(this_round):
            with naming_lost_peers("replicas could not be compared"):
                self._replicas.compare(
                    f"before gradients are averaged for the {this_round + 1}. time",
                    {"the number of steps taken": self._steps},
                )
        if self._has_hashes:
            self._wants_hashes = self._has_hashes = False
        if this_round < 2 or is_due(this_round + 1):
            self._wants_hashes = True
