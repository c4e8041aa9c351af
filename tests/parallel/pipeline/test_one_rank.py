"""All stages on one rank: no messages, the same runtime."""

import copy

import pytest
import torch
import torch.distributed as dist

from gradweave.errors import GradweaveError
from gradweave.parallel.pipeline import Pipeline
from gradweave.parallel.pipeline.api import PipelineState
from parallel.pipeline.models import batch, loss_fn, make, stock_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    backend = "gloo" if request.param == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device(request.param)
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{"policy": "fast_forward"}, {"policy": "modulo", "group": 2}])
def test_gradients_are_those_of_the_whole_model(device, options):
    stock = make("gpt").to(device)
    pipe = Pipeline(copy.deepcopy(stock), loss_fn, microbatches=4, device=device, **options)
    x, target = (one.to(device) for one in batch("gpt"))
    loss = pipe.step(x, target)
    losses = []
    for x_part, target_part in zip(x.chunk(4), target.chunk(4), strict=True):
        losses.append(loss_fn(stock(x_part), target_part))
        (losses[-1] / 4).backward()
    assert torch.equal(loss, torch.stack(losses).mean())
    grads = {name: p.grad for name, p in stock.named_parameters()}
    for name, p in pipe.module.named_parameters():
        if device.type == "cpu":
            assert torch.equal(p.grad, grads[name]), name
        else:
            torch.testing.assert_close(p.grad, grads[name])
    assert pipe.has_first_stage
    assert pipe.has_last_stage
    pipe.close()


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_step_of_another_kind_of_input(device):
    pipe = Pipeline(make("mlp"), loss_fn, microbatches=2, policy="modulo")
    stock = make("mlp")
    wanted = stock_step(stock, "mlp", 2)
    assert torch.equal(pipe.step(*batch("mlp")), wanted)
    with pytest.raises(ValueError, match="inputs=None: give a tensor"):
        pipe.step(None, None)


HEARD = []


class _Listening(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        HEARD.append(torch.is_autocast_enabled("cpu"))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        HEARD.append(torch.is_autocast_enabled("cpu"))
        return grad


class Listening(torch.nn.Linear):
    def forward(self, x):
        return _Listening.apply(super().forward(x))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_forwards_run_under_autocast_and_backwards_do_not(device):
    pipe = Pipeline(torch.nn.Sequential(Listening(6, 6)), torch.nn.functional.mse_loss, microbatches=1, policy="gpipe")
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(*batch("mlp"))
        HEARD.clear()
        pipe.step(*batch("mlp"))
    assert HEARD == [True, False]
    pipe.close()


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_states_from_open_to_closed(device):
    with Pipeline(make("mlp"), loss_fn, microbatches=2, policy="modulo") as pipe:
        assert pipe.state is PipelineState.OPEN
        with pytest.raises(GradweaveError):  # a step that all ranks refuse changes nothing
            pipe.step(None, None)
        assert pipe.state is PipelineState.OPEN
        pipe.step(*batch("mlp"))
        assert pipe.state is PipelineState.RUNNING
        assert pipe.is_attached
    assert pipe.state is PipelineState.CLOSED
    assert not pipe.is_attached
    pipe.close()
    with pytest.raises(GradweaveError, match="this pipeline is closed, make another one"):
        pipe.step(*batch("mlp"))


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_step_that_fails_ends_the_pipeline(device):
    def failing(output, target):
        raise ValueError("no loss")

    pipe = Pipeline(make("mlp"), failing, microbatches=2, policy="modulo")
    with pytest.raises((ValueError, RuntimeError)):
        pipe.step(*batch("mlp"))
    assert pipe.state is PipelineState.FAILED
    assert "has stopped after an error" in pipe.explain()
    with pytest.raises(GradweaveError, match="has stopped after an error: restart from a checkpoint"):
        pipe.step(*batch("mlp"))
    pipe.detach()
    assert pipe.state is PipelineState.CLOSED


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_it_explains_its_plan(device):
    pipe = Pipeline(make("mlp"), loss_fn, microbatches=2, policy="fast_forward")
    assert pipe.explain() == pipe.plan.explain()
    assert "8 layers on 1 ranks, 2 micro-batches; predicted 48 s a step" in pipe.explain()
    pipe.detach()
    assert pipe.explain() == "detached: this pipeline is closed, make another one"
