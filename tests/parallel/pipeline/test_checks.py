"""What else may be at work on the layers of a pipeline, on a real process group of one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradweave
from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.parallel.pipeline import Pipeline
from parallel.pipeline.models import batch, loss_fn, make


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refused(model, said):
    with pytest.raises((ArgumentError, UnsupportedError), match=said):
        Pipeline(model, loss_fn, microbatches=2)


TECHNIQUES = {"DASO": gradweave.DASO, "DataParallel": gradweave.DataParallel}


@pytest.mark.parametrize("name", TECHNIQUES)
@pytest.mark.parametrize("same", [True, False])
def test_a_model_whose_replicas_are_averaged(name, same):
    model = make("mlp")
    attached = TECHNIQUES[name](model, torch.optim.SGD(model.parameters(), lr=0.1))
    refused(model if same else nn.Sequential(*model), name)
    if isinstance(attached, nn.Module):
        refused(nn.Sequential(attached), name)
    attached.detach()
    Pipeline(model, loss_fn, microbatches=2).close()


@pytest.mark.parametrize("name", TECHNIQUES)
def test_layers_of_a_pipeline_are_no_replicas(name):
    model = make("mlp")
    pipe = Pipeline(model, loss_fn, microbatches=2)
    for given in (model, pipe.module, model[0]):
        with pytest.raises(UnsupportedError, match="part of a Pipeline"):
            TECHNIQUES[name](given, torch.optim.SGD(given.parameters(), lr=0.1))
    pipe.close()
    TECHNIQUES[name](model, torch.optim.SGD(model.parameters(), lr=0.1)).detach()


def test_reordered_layers():
    model = make("mlp")
    with gradweave.reorder(model[0], policy="side_stream"):
        refused(model, "is reordered")


def test_compiled_wrapped_and_sharded_layers():
    refused(nn.Sequential(torch.compile(nn.Linear(3, 3))), "compiled code cannot be split")
    refused(nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(3, 3))), "DistributedDataParallel")
    sharded = make("mlp")
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    refused(sharded, "FSDP")


def test_a_pipeline_is_no_model_for_others():
    pipe = Pipeline(make("mlp"), loss_fn, microbatches=2)
    optimizer = torch.optim.SGD(pipe.module.parameters(), lr=0.1)
    for technique in (
        lambda: gradweave.compile(pipe, lambda m, x: m(x).sum(), optimizer),
        lambda: gradweave.reorder(pipe),
        lambda: gradweave.DASO(pipe, optimizer),
        lambda: gradweave.DataParallel(pipe, optimizer),
        lambda: gradweave.fuse(pipe, optimizer),
    ):
        with pytest.raises(ArgumentError, match="model='Pipeline'"):
            technique()
    pipe.close()


def test_two_pipelines_on_the_same_layers_add_up_their_gradients():
    model = make("mlp")
    x, target = batch("mlp")
    first = Pipeline(model, loss_fn, microbatches=2, policy="fast_forward")
    first.step(x, target)
    once = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
    second = Pipeline(model, loss_fn, microbatches=2, policy="gpipe")
    second.step(x, target)
    assert once
    for p, grad in once.items():
        torch.testing.assert_close(p.grad, 2 * grad)
    first.close()
    second.close()
