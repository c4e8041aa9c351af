"""What every technique requires is refused with subject, reason and remedy."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from gradweave._runtime import requirements
from gradweave.errors import ArgumentError, UnsupportedError


def test_what_is_no_model_and_no_optimizer():
    with pytest.raises(ArgumentError, match=r"model='str': give an nn\.Module"):
        requirements.require_module("model")
    with pytest.raises(ArgumentError, match=r"optimizer='str': give a torch\.optim\.Optimizer"):
        requirements.require_optimizer("adam")
    params = nn.Linear(2, 2).parameters()
    with pytest.raises(UnsupportedError, match="LBFGS: it needs a closure"):
        requirements.require_optimizer(
            torch.optim.LBFGS(params), refused=(torch.optim.LBFGS,), remedy="it needs a closure"
        )


MODELS = {
    "copies": (lambda: nn.DataParallel(nn.Linear(2, 2)), requirements.refuse_copies, "one process per device"),
    "lazy": (lambda: nn.LazyLinear(2), lambda m: requirements.require_shapes(m.parameters()), "run a batch"),
    "devices": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
        lambda m: requirements.require_one_device(m.parameters()),
        "on one device",
    ),
    "compiled": (
        lambda: nn.Sequential(torch.compile(nn.Linear(2, 2))),
        lambda m: requirements.refuse_compiled(m, remedy="give the plain model"),
        "give the plain model",
    ),
    "foreign": (
        lambda: nn.Linear(2, 2),
        lambda m: requirements.require_owned(m, torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)),
        "give the model that owns it",
    ),
    "differentiable": (
        lambda: nn.Linear(2, 2),
        lambda m: requirements.require_undifferentiated(torch.optim.SGD(m.parameters(), differentiable=True)),
        "differentiable=False",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_refused_with_a_remedy(name):
    make, check, remedy = MODELS[name]
    with pytest.raises(UnsupportedError) as refused:
        check(make())
    assert remedy in str(refused.value)


def test_a_plain_model_passes():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    requirements.require_module(model)
    requirements.require_optimizer(optimizer)
    requirements.require_owned(model, optimizer)
    requirements.require_shapes(model.parameters())
    requirements.require_one_device(model.parameters())
    requirements.refuse_copies(model)
    requirements.refuse_compiled(model, remedy="")
    requirements.refuse_sharded(model)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_what_either_version_of_fsdp_has_sharded_is_refused_from_inside_and_outside(tmp_path, use_orig_params):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        wrapper = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
        newer = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        for sharded in (wrapper, model, model[1], nn.Sequential(wrapper), newer, nn.Sequential(newer)):
            with pytest.raises(UnsupportedError, match="FSDP: sharded parameters are not supported; give an"):
                requirements.refuse_sharded(sharded)
    finally:
        torch.distributed.destroy_process_group()
