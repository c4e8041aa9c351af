"""Private names of torch.distributed."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_distributed_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one rank's part of a larger one, as under FSDP2."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def default_store() -> Any:
    """Return the store that the default process group was made with."""
    return torch.distributed.distributed_c10d._get_default_store()


def part_of_default_store(name: str) -> Any:
    """Return a part of the default store, with keys of its own.

    Its connection is a clone: a wait on the default store's own connection would hold up every other call there.
    """
    store = default_store()
    part = torch.distributed.PrefixStore(name, store.clone())  # type: ignore[attr-defined]
    part.set_timeout(store.timeout)  # a clone of a store in a file has torch's own
    return part


def group_count() -> int:
    """Return the number of process groups that this rank is in."""
    return len(torch.distributed.distributed_c10d._world.pg_names)


def active_ddp() -> Any:
    """Return the DistributedDataParallel, or that of ``replicate``, whose forward is running; None if none is."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def ddp_parameters(wrapper: Any) -> list[torch.Tensor]:
    """Return the parameters that a DistributedDataParallel averages, without those that it was told to ignore."""
    return list(wrapper._module_parameters)


def is_managed_by_fsdp(module: torch.nn.Module) -> bool:
    """Return whether FSDP, of either version, shards or replicates a module or what the module is in."""
    if getattr(module, "_is_fsdp_managed_module", False):
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def is_flattened_by_fsdp(parameter: torch.Tensor) -> bool:
    """Return whether FSDP's first version has made a parameter a part of a flat one."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def start_sum(tensor: torch.Tensor, group_name: str) -> torch.Tensor:
    """Start to sum a tensor over the ranks of a group, as an operation that a tracer records.

    Args:
        tensor: What this rank adds.
        group_name: Name of the process group, by which a graph refers to it.

    Returns:
        A tensor to be read behind :func:`finish_sum` only.
    """
    return torch.ops._c10d_functional.all_reduce.default(tensor, "sum", group_name)  # type: ignore[no-any-return]


def finish_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for what :func:`start_sum` has started; what runs next on the current stream sees the sum."""
    return torch.ops._c10d_functional.wait_tensor.default(tensor)  # type: ignore[no-any-return]


def starts_sum(node: torch.fx.Node) -> bool:
    """Return whether a node is what :func:`start_sum` records."""
    return node.target is torch.ops._c10d_functional.all_reduce.default


def finishes_sum(node: torch.fx.Node) -> bool:
    """Return whether a node is what :func:`finish_sum` records."""
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def has_ended(group: Any) -> bool:
    """Return whether a process group was destroyed."""
    return group not in torch.distributed.distributed_c10d._world.pg_names


def name_of_group(group: Any) -> str:
    """Return the name by which a graph refers to a process group."""
    return str(group.group_name)


def end_group(group: Any) -> None:
    """End a process group of one's own, which frees its connections and threads.

    Nothing happens if the program has ended it, as ``destroy_process_group()`` does with all. Nor while there is one
    that torch has named by the number of groups: the next could get a name for the second time, and find what is left
    under it in the store. A technique ends its groups before the program ends the default group, while the store that
    they were made with is still there.
    """
    names = torch.distributed.distributed_c10d._world.pg_names
    if group in names and all(name.isdecimal() for name in names.values()):
        torch.distributed.destroy_process_group(group)


def joins_uneven_inputs(wrapper: Any) -> bool:
    """Return whether a DistributedDataParallel is in ``join()``: ranks may run out of inputs at different steps."""
    return bool(wrapper._join_config.enable)
