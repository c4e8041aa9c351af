import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradweave import compile, fuse
from gradweave.errors import UnsupportedError
from gradweave.parallel.daso import DASO
from gradweave.parallel.data_parallel import DataParallel


def test_what_is_refused_names_argument_and_remedy(two_by_two):
    for said in two_by_two.run("refusals").values():
        assert "DistributedDataParallel" in said["world"]
        assert 'process_group=mesh.get_group("local")' in said["world"]
        assert "torch.optim.Optimizer" in said["optimizer"]
        assert "LBFGS" in said["lbfgs"]
        assert "('node', 'local')" in said["mesh"]
        assert "has a DASO already" in said["twice"]
        assert "on rank 1 and of shape" in said["shapes"]
        assert "sparse=False" in said["sparse"]


def test_fusion_and_daso_refuse_each_other():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fuse(model, optimizer, "forward"), pytest.raises(UnsupportedError, match="is fused"):
        DASO(model, optimizer)
    daso = DASO(model, optimizer)
    with pytest.raises(UnsupportedError, match="DASO"):
        fuse(model, optimizer)
    daso.detach()
    fuse(model, optimizer, "forward").detach()


def test_a_compiled_step_and_daso_refuse_each_other():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    daso = DASO(model, optimizer)
    with pytest.raises(UnsupportedError, match="DASO"):
        compile(model, lambda m, x: m(x).sum(), optimizer)
    daso.detach()
    step = compile(model, lambda m, x: m(x).sum(), optimizer, lower="replay")
    with pytest.raises(UnsupportedError, match="compiled step"):
        DASO(model, optimizer)
    del step


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_scripted_part_is_trained_and_a_scripted_model_refused():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    daso = DASO(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    daso.finish()
    assert daso.steps == 1
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.script"):
        DASO(torch.jit.script(model), optimizer)


def test_a_model_in_data_parallel_whatever_its_optimizer():
    model = nn.Linear(2, 2)
    with DASO(model, torch.optim.SGD(model.parameters(), lr=0.1)), pytest.raises(UnsupportedError, match="has a DASO"):
        DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match="is in a DataParallel"):
        DASO(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped.detach()


def test_two_devices_and_data_parallel_are_refused():
    model = nn.DataParallel(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="one process per device"):
        DASO(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UnsupportedError, match="on 2 devices"):
        DASO(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_sharded_parameters_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedError, match="FSDP"):
            DASO(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        dist.destroy_process_group()
