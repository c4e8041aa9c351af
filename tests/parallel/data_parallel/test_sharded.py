"""Sharded and wrapped models, on a real process group of one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradweave.errors import UnsupportedError
from gradweave.parallel.data_parallel import DataParallel


def test_sharded_and_wrapped_models_are_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(3, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedError, match="FSDP"):
            DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
        with pytest.raises(UnsupportedError, match="averages gradients by itself"):
            DataParallel(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    finally:
        dist.destroy_process_group()
