"""Models and optimizers that DASO refuses, before any weight has changed."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradweave import compile, fuse
from gradweave.errors import GradweaveError, UnsupportedError
from gradweave.parallel.daso import DASO
from gradweave.parallel.data_parallel import DataParallel
from parallel.daso.training import TIMEOUT, make_batch, make_model, make_optimizer, one_step, setting, weights_of


def refusals():
    """What cannot be done, with the message; nothing may hang."""
    said = {}

    def refuse(name, make):
        try:
            make()
            said[name] = None
        except GradweaveError as error:
            said[name] = str(error)

    model, opt = setting()
    refuse("world", lambda: DASO(DistributedDataParallel(model), opt))
    refuse("optimizer", lambda: DASO(model, model))
    refuse("lbfgs", lambda: DASO(model, torch.optim.LBFGS(model.parameters())))
    refuse("mesh", lambda: DASO(model, opt, init_device_mesh("cpu", (4,), mesh_dim_names=("all",))))
    daso = DASO(model, opt, timeout=TIMEOUT)
    refuse("twice", lambda: DASO(model, opt))
    daso.detach()
    other = nn.Linear(2 + dist.get_rank() % 2, 1)
    refuse("shapes", lambda: DASO(other, torch.optim.SGD(other.parameters(), lr=0.1), timeout=TIMEOUT))
    sparse = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    daso = DASO(sparse, optimizer, timeout=TIMEOUT)
    refuse("sparse", lambda: sparse(torch.tensor([1])).sum().backward())
    daso.detach()
    return said


def test_what_is_refused_names_argument_and_remedy(two_by_two):
    for said in two_by_two.run(refusals).values():
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


class _Around(nn.Module):
    """As a Lightning module: it goes past the forward of the model that was given."""

    def __init__(self, model):
        super().__init__()
        self.net = model

    def forward(self, x):
        return self.net[2](self.net[1](self.net[0](x)))


def averaged_twice(*, how):
    """Something else that averages too: what is said, at which step, and whether weights had moved by then."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    local = mesh.get_group("local")
    model = make_model()
    opt = make_optimizer(model.parameters())
    options = {"every": 3, "wait": 1, "timeout": TIMEOUT}
    before, number, daso = weights_of(model), -1, None
    try:
        if how == "DDP first":
            daso = DASO(DistributedDataParallel(model), opt, mesh, **options)
        if how == "DDP of a part first":
            model[2] = DistributedDataParallel(model[2], process_group=local)
            daso = DASO(model, opt, mesh, **options)
        daso = daso or DASO(model, opt, mesh, **options)
        before, run = weights_of(model), model
        if how == "evaluated under DDP":
            with torch.no_grad():
                DistributedDataParallel(model)(make_batch(0, 0)[0])
        if how == "DDP that is not used":
            unused = DistributedDataParallel(model)
            assert unused.module is model
        if how in ("DDP afterwards", "local DDP afterwards", "compiled under DDP", "part of a module under DDP"):
            run = DistributedDataParallel(
                torch.compile(model, backend="aot_eager") if "compiled" in how
                else _Around(model) if "part" in how else model,
                process_group=local if "local" in how else None,
            )  # fmt: skip
        if how.startswith("Accelerate"):
            from accelerate import Accelerator

            with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}):
                run, opt = Accelerator(cpu=True).prepare(model, opt)
        if how == "FSDP afterwards":
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        for number in range(4):
            one_step(run, opt, number)
    except GradweaveError as error:
        said = str(error)
    else:
        said = None
    moved = how != "FSDP afterwards" and not torch.equal(before, weights_of(model))
    if daso is not None:
        daso.detach()
    return said, number, moved


@pytest.mark.parametrize(
    "how",
    ["DDP first", "DDP of a part first", "DDP afterwards", "local DDP afterwards", "compiled under DDP",
     "part of a module under DDP", "Accelerate afterwards", "FSDP afterwards"],
)  # fmt: skip
def test_what_else_averages_is_found_before_it_has(two_by_two, how):
    for said, number, moved in two_by_two.run(averaged_twice, how=how).values():
        assert said is not None
        assert "averages gradients already" in said
        assert ("FSDP" if "FSDP" in how else "DistributedDataParallel") in said
        assert number <= 0
        assert not moved


@pytest.mark.parametrize("how", ["evaluated under DDP", "DDP that is not used"])
def test_wrappers_that_average_nothing_do_no_harm(two_by_two, how):
    for said, number, moved in two_by_two.run(averaged_twice, how=how).values():
        assert said is None
        assert (number, moved) == (3, True)
