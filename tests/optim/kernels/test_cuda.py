"""On a GPU: the host does not wait, steps can be captured, and kernels agree with torch's operations."""

import copy

import pytest
import torch
from torch import nn

import gradweave
from gradweave.optim import Eva, EvaF, EvaS
from gradweave.optim.kernels import gpu_statistics, step
from optim.models import images, loss_of, make_conv, train, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
every = pytest.mark.parametrize("cls", [Eva, EvaF, EvaS])


def use_kernels(monkeypatch, *, enabled):
    for module in (step, gpu_statistics):
        monkeypatch.setattr(module, "has_kernels", lambda _: enabled)


@pytest.fixture(autouse=True, params=[False, True], ids=["torch", "kernels"])
def kernels(request, monkeypatch):
    """Whether kernels of our own run."""
    if not request.param:
        use_kernels(monkeypatch, enabled=False)
    return request.param


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


@pytest.mark.parametrize("cls", [Eva, EvaF])
def test_kernels_give_what_double_precision_gives_without(cls, kernels):
    """Layers of many sizes, aligned and not, with gradients that are given: nothing but the step differs."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    model = nn.ModuleList(
        [
            nn.Linear(768, 2304), nn.Linear(1001, 37), nn.Linear(4, 5000, bias=False), nn.Conv2d(64, 64, 3, bias=False),
            nn.Conv2d(32, 32, 3, groups=32), nn.ConvTranspose2d(8, 6, 3, groups=2), nn.LayerNorm(999),
            nn.Conv2d(16, 24, 3).to(memory_format=torch.channels_last), nn.Embedding(1000, 64),
        ]
    ).cuda()  # fmt: skip
    slow = copy.deepcopy(model).double()
    dampings = {"damping": 1.0, "weight_decay": 0.1}
    optimizer, stock = cls(model, **dampings), cls(slow, foreach=False, **dampings)
    for _ in range(3):
        for p, q in zip(model.parameters(), slow.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.double()
            if "record" in optimizer.state[p]:
                record = optimizer.state[p]["record"]
                record.normal_()
                record[optimizer.state[p]["input_vector"].numel()] = 7.0
                stock.state[q]["record"].copy_(record)
        optimizer.step()
        stock.step()
        for p, q in zip(model.parameters(), slow.parameters(), strict=True):
            for one, other in [(p, q), *((optimizer.state[p][key], stock.state[q][key]) for key in stock.state[q])]:
                one, other = (torch.as_tensor(x).detach().double().cpu() for x in (one, other))
                assert (one - other).abs().max() <= 5e-5 * other.abs().max().clamp_min(1e-3), tuple(p.shape)
    assert len(optimizer._fused.plans) == int(kernels)


@pytest.mark.parametrize("cls", [Eva, EvaF])
def test_eager_steps_between_replays_of_a_captured_one(cls):
    """Each has a table of addresses of its own."""
    pytest.importorskip("triton")
    model, other = make_conv().cuda(), make_conv().cuda()
    optimizer, stock = cls(model, capturable=True), cls(other)
    given = batches(8)
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
    for number, batch in enumerate(given[3:]):
        train(other, stock, [batch])
        if number % 2:
            train(model, optimizer, [batch])
        else:
            x.copy_(batch)
            graph.replay()
        assert torch.allclose(weights(model), weights(other), atol=1e-2)
    assert all(plan.is_in_graph for plan in optimizer._fused.plans.values())


@every
def test_a_state_dict_that_was_on_the_cpu(cls):
    model, other = make_conv().cuda(), make_conv().cuda()
    optimizer, resumed = cls(model), cls(other)
    train(model, optimizer, batches(2))
    other.load_state_dict(model.state_dict())
    on_cpu = optimizer.state_dict()
    on_cpu["state"] = {
        index: {key: x.cpu().clone() if isinstance(x, torch.Tensor) else x for key, x in entry.items()}
        for index, entry in on_cpu["state"].items()
    }
    resumed.load_state_dict(on_cpu)
    losses = train(model, optimizer, batches(2))
    assert train(other, resumed, batches(2)) == pytest.approx(losses, rel=1e-3)


def records_after(model, cls, x, dtype, monkeypatch, *, with_kernels):
    """Return the records of a model's layers after a backward of its copy."""
    use_kernels(monkeypatch, enabled=with_kernels)
    model = copy.deepcopy(model)
    optimizer = cls(model)
    with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
        out = model(x)
    out.float().square().mean().backward()
    return [state["record"] for state in optimizer.state.values() if "record" in state]


@pytest.mark.parametrize("cls", [Eva, EvaF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_sums_in_kernels_are_those_without(cls, dtype, order, monkeypatch):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 7, 2, 3), nn.ReLU(inplace=True), nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.ReLU()]
    layers += [nn.Conv2d(64, 48, 1, 2), nn.ReLU(), nn.Conv2d(48, 32, 3, 2, groups=2), nn.Flatten(), nn.LazyLinear(10)]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(20, 3, 40, 36, device="cuda").to(dtype).float().contiguous(memory_format=order)
    model(x)
    model = model.to(memory_format=order)
    ours, stock = (records_after(model, cls, x, dtype, monkeypatch, with_kernels=kind) for kind in (True, False))
    assert len(ours) == len(stock) == 5
    for one, other in zip(ours, stock, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(other[:-1].abs().mean()))


@pytest.mark.parametrize("cls", [Eva, EvaF])
def test_vectors_of_a_captured_backward_whose_steps_are_eager(cls):
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
    for batch in given[3:]:
        x.copy_(batch)
        graph.replay()
        optimizer.step()
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.zero_()
    train(other, stock, given[3:])
    assert torch.allclose(weights(model), weights(other), atol=1e-3)


@every
def test_a_loss_that_is_no_number_changes_nothing(cls):
    model = make_conv().cuda()
    optimizer = cls(model)
    given = batches(3)
    train(model, optimizer, given[:2])
    before = [w.clone() for w in weights(model)]
    (loss_of(model, given[2]) * torch.nan).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    train(model, optimizer, given[2:])
    assert all(w.isfinite().all() for w in weights(model))
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
