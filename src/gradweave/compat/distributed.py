"""Private names of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch


def is_distributed_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one rank's part of a larger one, as under FSDP2."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def default_store() -> Any:
    """The store that the default process group was made with."""
    return torch.distributed.distributed_c10d._get_default_store()


def part_of_default_store(name: str) -> Any:
    """The same store, with keys of its own, over a connection on which waiting holds up nobody else."""
    return torch.distributed.PrefixStore(name, default_store().clone())  # type: ignore[attr-defined]


def group_count() -> int:
    """How many process groups this rank has made, or is in."""
    return len(torch.distributed.distributed_c10d._world.pg_names)


def active_ddp() -> Any:
    """The DistributedDataParallel in whose forward this thread's code runs; None outside of one."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


def joins_uneven_inputs(wrapper: Any) -> bool:
    """Whether a DistributedDataParallel is in its ``join()``, where ranks may run out of inputs at different steps."""
    return bool(wrapper._join_config.enable)
