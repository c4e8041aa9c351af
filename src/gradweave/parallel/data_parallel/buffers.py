"""Parameters and buffers that are the first rank's on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from gradweave.parallel.data_parallel.failures import naming_lost_peers


def share_state(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks the first one's parameters and buffers, before training.

    A message is a dense copy: the layout in memory may differ between ranks, as with channels last on one of them.
    """
    root = dist.get_global_rank(group, 0)
    with torch.no_grad(), naming_lost_peers("weights could not be shared"):
        for tensor in (*model.parameters(), *model.buffers()):
            dense = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(dense, root, group=group)
            tensor.copy_(dense)


class BufferSharing:
    """Gives all ranks the first one's buffers before each forward, in one message for each type.

    Args:
        model: Whose buffers.
        group: Not that of gradients, so that buffers do not queue up after them.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._model = model
        self._group = group
        self._root = dist.get_global_rank(group, 0)

    def share(self) -> None:
        """Take the first rank's buffers; all ranks call it together."""
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self._model.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad(), naming_lost_peers("buffers could not be shared"):
            for buffers in by_type.values():
                message = torch.cat([buffer.reshape(-1) for buffer in buffers])
                dist.broadcast(message, self._root, group=self._group)
                if dist.get_rank(self._group) > 0:
                    for buffer, part in zip(buffers, message.split([b.numel() for b in buffers]), strict=True):
                        buffer.data.copy_(part.view(buffer.shape))  # a backward to come may have saved it
