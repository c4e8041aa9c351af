"""Sharded models, on a real process group of one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradweave
from compiler.models import adamw, loss_fn, make
from gradweave.errors import UnsupportedError


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_sharded_parameters_are_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make("mlp")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedError, match="FSDP"):
            gradweave.compile(model, loss_fn, adamw(model.parameters()))
        wrapped = torch.nn.parallel.DistributedDataParallel(make("mlp"))
        with pytest.raises(UnsupportedError, match="DistributedDataParallel"):
            gradweave.compile(wrapped, loss_fn, adamw(wrapped.parameters()))
    finally:
        dist.destroy_process_group()
