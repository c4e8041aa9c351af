import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F

import gradweave
from compiler.models import adamw, batches, loss_fn, make
from gradweave.errors import ArgumentError, UnsupportedError

BAD = {
    "lower": ({"lower": "xla"}, "lower='xla'.*inductor, replay"),
    "new_shapes": ({"new_shapes": "crop"}, "new_shapes='crop'"),
    "variants": ({"variants": 0}, "variants=0"),
    "memory_budget": ({"memory_budget": 1.5}, r"memory_budget=1.5.*0 to 1"),
    "max_grad_norm": ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0.*positive"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    options, message = BAD[name]
    model = make("mlp")
    with pytest.raises(ArgumentError, match=message):
        gradweave.compile(model, loss_fn, adamw(model.parameters()), **options)


def test_what_is_refused_at_once():
    model = make("mlp")
    with pytest.raises(UnsupportedError, match="LBFGS"):
        gradweave.compile(model, loss_fn, optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError, match="DataParallel"):
        gradweave.compile(nn.DataParallel(model), loss_fn, adamw(model.parameters()))
    hooked = adamw(model.parameters())
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="step hooks"):
        gradweave.compile(model, loss_fn, hooked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": "1"}, "max_grad_norm='1'"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan"),
        ({"max_grad_value": True}, "max_grad_value=True"),
        ({"memory_budget": "0.5"}, "memory_budget='0.5'"),
        ({"variants": 2.0}, "variants=2.0"),
        ({"lower": None}, "lower=None"),
        ({"scaler": True}, "scaler='bool'"),
        ({"costs": "measured"}, "costs='str'"),
        ({"loss_fn": nn.CrossEntropyLoss()}, "loss_fn='CrossEntropyLoss'.*not with the model.*lambda"),
        ({"loss_fn": F.cross_entropy}, "loss_fn='cross_entropy'.*not with the model"),
        ({"loss_fn": lambda: None}, "loss_fn='<lambda>'.*takes no model"),
        ({"loss_fn": "mse"}, "loss_fn='str'"),
        ({"optimizer": "adam"}, "optimizer='str'"),
    ],
)
def test_bad_arguments_are_named(options, message):
    model = make("mlp")
    given = {"loss_fn": loss_fn, "optimizer": adamw(model.parameters()), **options}
    with pytest.raises(ArgumentError, match=message):
        gradweave.compile(model, **given)


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


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("shard", ["FSDP", "FSDP2"])
def test_a_model_that_is_sharded_after_compile_is_refused_in_the_first_step(tmp_path, shard):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make("mlp")
        step = gradweave.compile(model, loss_fn, adamw(model.parameters()), lower="replay")
        if shard == "FSDP":
            FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(UnsupportedError, match="FSDP"):
            step(*next(batches(1)))
        assert all(torch.equal(p.detach(), q) for p, q in zip(model.parameters(), before, strict=True))
    finally:
        dist.destroy_process_group()
