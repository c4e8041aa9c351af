"""Two real ranks: DDP reduces the weight gradients that come last as it does all others."""

import pytest

from ranks import run_ranks

WORKER = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from fusion.loops import adamw, batches, loss_of, make_net
from ranks import agree_and_leave
from gradweave.reordering.api import reorder

rank, store, budget = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
results = []
for reordered in (False, True):
    model = DistributedDataParallel(make_net())
    optimizer = adamw(model)
    if reordered:
        handle = reorder(model, "side_stream", byte_budget=None if budget == "none" else int(budget))
    for number, (x, y) in enumerate(batches(20)):
        if number % 2 != rank:
            continue
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
assert budget == "0" or handle.most_bytes_held > 0
agree_and_leave(results)
"""


@pytest.mark.parametrize("budget", ["none", "0"])
def test_two_ranks_train_as_under_plain_ddp(budget, tmp_path):
    run_ranks(WORKER, tmp_path / "store", budget)


CROSSING = """
import sys
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from reordering.test_cross_step import crossing_costs, net
from ranks import agree_and_leave
from gradweave.fusion import fuse
from gradweave.reordering import reorder

rank, store, view = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "view"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
results = []
for woven in (False, True):
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    if woven:
        fuse(model, optimizer, "forward")
        reorder(model, "cross_step", costs=crossing_costs(model))
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=view)
    torch.manual_seed(rank)
    for _ in range(6):
        wrapped(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
agree_and_leave(results)
"""


@pytest.mark.parametrize("view", ["view", "copy"])
def test_a_model_that_is_wrapped_after_it_may_cross_steps_has_its_gradients_averaged(view, tmp_path):
    run_ranks(CROSSING, tmp_path / "store", view)


SHARDED = """
import sys
import warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from fusion.loops import adamw, batches, loss_of, make_net
from ranks import agree_and_leave
from gradweave.reordering.api import reorder

rank, store = int(sys.argv[1]), sys.argv[2]
warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
results = []
for reordered in (False, True):
    model = make_net()
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    if reordered:
        reorder(model, "side_stream")
    wrapper = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = adamw(wrapper)
    for number, (x, y) in enumerate(batches(20)):
        if number % 2 == rank:
            loss_of(wrapper, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(wrapper):
        results.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    assert not torch.equal(results[-1], start)
agree_and_leave(results)
"""


def test_two_ranks_that_are_sharded_after_reorder_train_as_under_plain_fsdp(tmp_path):
    run_ranks(SHARDED, tmp_path / "store")
