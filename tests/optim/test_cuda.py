"""On a GPU: nothing waits for it, and steps can be captured."""

import pytest
import torch

import gradweave
from gradweave.optim import Eva, EvaF, EvaS
from optim.models import images, loss_of, make_conv, train, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
every = pytest.mark.parametrize("cls", [Eva, EvaF, EvaS])


def batches(count):
    return [x.cuda() for x in images(count)]


@every
def test_a_step_does_not_wait_for_the_device(cls):
    model = make_conv().cuda()
    optimizer = cls(model)
    train(model, optimizer, batches(2))
    x = batches(1)[0]
    try:
        torch.cuda.set_sync_debug_mode("error")
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every
def test_captured_steps_follow_the_eager_ones(cls):
    model, other = make_conv().cuda(), make_conv().cuda()
    optimizer, stock = cls(model, capturable=True), cls(other)
    given = batches(6)
    x = given[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(model, optimizer, given[:3])
    torch.cuda.current_stream().wait_stream(side)
    train(other, stock, given[:3])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    for batch in given[3:]:
        x.copy_(batch)
        graph.replay()
    train(other, stock, given[3:])
    assert torch.allclose(weights(model), weights(other), atol=1e-3)


@pytest.mark.parametrize("cls", [Eva, EvaF])
def test_compiled_steps_on_a_gpu(cls):
    model, other = make_conv().cuda(), make_conv().cuda()
    step = gradweave.compile(model, loss_of, cls(model))
    losses = [step(x).item() for x in batches(6)]
    assert losses == pytest.approx(train(other, cls(other), batches(6)), rel=1e-2)


@every
def test_half_precision_with_gradient_scaling(cls):
    model = make_conv().cuda()
    optimizer = cls(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    for x in batches(4) * 8:
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert torch.isfinite(weights(model)).all()
    assert scaler.get_scale() < 2.0**40
