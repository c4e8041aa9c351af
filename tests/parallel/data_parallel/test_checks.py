import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradweave
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.parallel.data_parallel import DataParallel
from gradweave.reordering import reorder


def setting():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return model, optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "fast"}, "policy='fast': use one of auto"),
        ({"k": 3}, "k=3: use it with policy"),
        ({"policy": "reverse_first_k", "k": "some"}, "k='some': give a number of layers"),
        ({"policy": "reverse_first_k", "k": -1}, "k=-1: give 0 or more"),
        ({"bucket_bytes": 0}, "bucket_bytes=0: give at least 1"),
        ({"byte_budget": -1}, "byte_budget=-1: give 0 or more"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype=torch.int8: give a floating point type"),
    ],
)
def test_options_that_are_refused(options, said):
    with pytest.raises(ArgumentError, match=said):
        DataParallel(*setting(), **options)


def test_models_and_optimizers_that_are_refused():
    model, optimizer = setting()
    other, _ = setting()
    for arguments, said in (
        ((model, "sgd"), "give a torch.optim.Optimizer"),
        ((model, optim.LBFGS(model.parameters())), "cannot be updated in parts"),
        ((other, optimizer), "is not in the model"),
        ((nn.DataParallel(model), optimizer), "one process per device"),
        ((torch.compile(model), optimizer), r"torch\.compile: compiled code runs the layers"),
        ((nn.Sequential(nn.LazyLinear(3)), optim.SGD(other.parameters(), lr=0.1)), "is not in the model"),
    ):
        with pytest.raises((ArgumentError, UnsupportedError), match=said):
            DataParallel(*arguments)
    model.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="no parameter that is trained"):
        DataParallel(model, optimizer)


def test_more_layers_than_there_are():
    model, optimizer = setting()
    wrapped = DataParallel(model, optimizer, policy="reverse_first_k", k=3)
    wrapped(torch.zeros(1, 3)).sum().backward()
    optimizer.step()
    for _ in range(2):
        with pytest.raises(ArgumentError, match="k=3: give 0 to 2"):
            wrapped(torch.zeros(1, 3))
    wrapped.detach()
    wrapped(torch.zeros(1, 3)).sum().backward()


def test_a_second_one_is_refused_until_the_first_is_detached():
    model, optimizer = setting()
    wrapped = DataParallel(model, optimizer)
    with pytest.raises(UnsupportedError, match="is in a DataParallel already"):
        DataParallel(model, optimizer)
    assert wrapped.detach() is model
    DataParallel(model, optimizer).detach()
    with pytest.raises(GradweaveError, match="is detached"), wrapped.no_sync():
        pass


def test_fusion_and_data_parallel_refuse_each_other():
    model, optimizer = setting()
    with gradweave.fuse(model, optimizer, mode="forward"), pytest.raises(UnsupportedError, match="is fused"):
        DataParallel(model, optimizer)
    wrapped = DataParallel(model, optimizer)
    with pytest.raises(UnsupportedError, match="DataParallel"):
        gradweave.fuse(model, optimizer)
    with pytest.raises(UnsupportedError, match="DataParallel"):
        gradweave.fuse(wrapped, optimizer)


def test_a_compiled_step_and_data_parallel_refuse_each_other():
    model, optimizer = setting()
    step = gradweave.compile(model, lambda m, x: m(x).sum(), optimizer, lower="replay")
    with pytest.raises(UnsupportedError, match="is part of a compiled step"):
        DataParallel(model, optimizer)
    del step
    DataParallel(model, optimizer)
    with pytest.raises(UnsupportedError, match="DataParallel"):
        gradweave.compile(model, lambda m, x: m(x).sum(), optimizer)


def test_daso_and_data_parallel_refuse_each_other():
    model, optimizer = setting()
    daso = gradweave.DASO(model, optimizer)
    with pytest.raises(UnsupportedError, match="has a DASO"):
        DataParallel(model, optimizer)
    daso.detach()
    wrapped = DataParallel(model, optimizer)
    with pytest.raises(UnsupportedError, match="DataParallel"):
        gradweave.DASO(model, optimizer)
    wrapped.detach()


def test_reorder_and_data_parallel_refuse_each_other():
    model, optimizer = setting()
    with reorder(model, policy="side_stream"), pytest.raises(UnsupportedError, match="is reordered"):
        DataParallel(model, optimizer)
    wrapped = DataParallel(model, optimizer)
    for given in (model, wrapped):
        with pytest.raises(UnsupportedError, match="is in a DataParallel"):
            reorder(given, policy="side_stream")
    reorder(copy.deepcopy(model), policy="side_stream").detach()
    wrapped.detach()
    reorder(model, policy="side_stream").detach()


@pytest.mark.parametrize("policy", ["auto", "in_order", "no_barrier", "reverse_first_k"])
def test_one_rank_trains_as_if_it_were_not_there(policy):
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model, optimizer = setting()
        trained = DataParallel(model, optimizer, policy=policy) if wrap else model
        for number in range(5):
            trained(torch.full((2, 3), number + 1.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


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
