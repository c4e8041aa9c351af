"""Two real ranks: the update must wait for the averaged gradient."""

import pytest
import torch

from fusion.loops import adamw, make_net
from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.fusion import fuse
from ranks import run_ranks

WORKER = """
import sys
import torch
from torch import nn
import torch.distributed as dist
from fusion.loops import adamw, batches, loss_of, make_net
from ranks import agree_and_leave
from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.fusion import fuse

rank, store, mode, clip = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "clip"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
results = []
for used in (None, mode):
    model = nn.parallel.DistributedDataParallel(make_net())
    optimizer = adamw(model)
    fusion = fuse(model, optimizer, used) if used else None
    for number, (x, y) in enumerate(batches(44)):
        if number % 2 != rank:
            continue
        loss_of(model, x, y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    if fusion:
        fusion.detach()
    results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
agree_and_leave(results)
"""


@pytest.mark.parametrize("mode", ["forward", "auto"])
@pytest.mark.parametrize("clip", ["clip", "free"])
def test_two_ranks_train_as_under_plain_ddp(mode, clip, tmp_path):
    run_ranks(WORKER, tmp_path / "store", mode, clip)


SHARDED = """
import sys
import warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from fusion.loops import adamw, batches, loss_of, make_net
from ranks import agree_and_leave
from gradweave.fusion import fuse

rank, store = int(sys.argv[1]), sys.argv[2]
warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
results = []
for mode in (None, "forward", "backward", "auto"):
    model = make_net()
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = adamw(model)
    fusion = fuse(model, optimizer, mode) if mode else None
    wrapper = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    for number, (x, y) in enumerate(batches(44)):
        if number % 2 == rank:
            loss_of(wrapper, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    if fusion:
        fusion.detach()
    with FullyShardedDataParallel.summon_full_params(wrapper):
        results.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    assert not torch.equal(results[-1], start)
agree_and_leave(results)
"""


def test_two_ranks_that_are_sharded_after_fuse_train_as_under_plain_fsdp(tmp_path):
    run_ranks(SHARDED, tmp_path / "store")


def test_backward_is_refused_under_ddp(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(make_net())
        with pytest.raises(ArgumentError, match='before DDP has averaged them; use mode="forward"'):
            fuse(model, adamw(model), "backward")
    finally:
        torch.distributed.destroy_process_group()


def test_fsdp_is_refused(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make_net()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedError, match="FSDP"):
            fuse(model, adamw(model), "forward")
    finally:
        torch.distributed.destroy_process_group()
