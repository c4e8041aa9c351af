"""Groups, stores and wrappers of torch.distributed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradweave._compat import distributed


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_modules_and_tensors():
    plain, sharded = nn.Linear(2, 2), nn.Linear(2, 2)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    assert [distributed.is_managed_by_fsdp(m) for m in (plain, sharded)] == [False, True]
    assert [distributed.is_distributed_tensor(m.weight) for m in (plain, sharded)] == [False, True]


def test_a_wrapper_that_is_running_and_what_it_averages():
    class Looks(nn.Linear):
        def forward(self, x):
            self.seen = distributed.active_ddp()
            return super().forward(x)

    layer = Looks(2, 2)
    wrapper = DistributedDataParallel(layer)
    assert distributed.active_ddp() is None
    wrapper(torch.ones(1, 2))
    assert layer.seen is wrapper
    assert set(distributed.ddp_parameters(wrapper)) == set(layer.parameters())
    assert not distributed.joins_uneven_inputs(wrapper)
    with wrapper.join():
        assert distributed.joins_uneven_inputs(wrapper)


def test_a_part_of_the_store_has_keys_of_its_own():
    part = distributed.part_of_default_store("ours")
    part.set("key", "1")
    assert distributed.default_store().check(["ours/key"])
    assert not distributed.default_store().check(["key"])


def test_groups_are_counted_and_ended():
    before = distributed.group_count()
    made = dist.new_group([0])
    assert distributed.group_count() == before + 1
    distributed.end_group(made)
    distributed.end_group(made)
    assert distributed.group_count() == before
