"""Fusion on a GPU: streams, events and memory, which CPU tests cannot show."""

import pytest
import torch
from torch import nn, optim

from fusion.loops import assert_same, batches, loss_of, make_net
from gradweave._runtime import buckets
from gradweave.fusion import fuse

pytestmark = pytest.mark.gpu
MODES = ("backward", "forward")

FORMS = {
    "fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "capturable": lambda p: optim.AdamW(p, lr=0.01, capturable=True),
    "plain": lambda p: optim.AdamW(p, lr=0.01, foreach=False),
    "fused SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused, lr a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.01, device="cuda"), fused=True),
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setattr(buckets, "CUDA_BUCKET_BYTES", 2000)
    torch.backends.cuda.matmul.allow_tf32 = False


class Wide(nn.Sequential):
    """Large enough that updates on another stream really run beside the forward."""

    def __init__(self):
        super().__init__(nn.Linear(6, 2048), nn.ReLU(), *(nn.Linear(2048, 2048) for _ in range(6)), nn.Linear(2048, 3))


def train(make, mode, cls=Wide, steps=12, clip=None, dtype=torch.float32):
    model = make_net(cls=cls).cuda().to(dtype)
    optimizer = make(model.parameters())
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    fusion = fuse(model, optimizer, mode) if mode else None
    for x, y in batches(steps):
        loss_of(model, x.cuda().to(dtype), y.cuda()).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if fusion:
        fusion.detach()
    return model, optimizer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_bit_identical(form, mode):
    assert_same(train(FORMS[form], None), train(FORMS[form], mode))


@pytest.mark.parametrize("mode", MODES)
def test_bit_identical_in_bfloat16(mode):
    assert_same(train(FORMS["fused"], None, dtype=torch.bfloat16), train(FORMS["fused"], mode, dtype=torch.bfloat16))


def test_clipping_is_exact_under_forward():
    assert_same(train(FORMS["fused"], None, clip=0.1), train(FORMS["fused"], "forward", clip=0.1))


@pytest.mark.parametrize("form", ["fused", "foreach"])
def test_gradient_scaling_with_infinities(form):
    def run(mode):
        model = make_net(cls=Wide).cuda()
        optimizer = FORMS[form](model.parameters())
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3)
        fusion = fuse(model, optimizer, mode) if mode else None
        for i, (x, y) in enumerate(batches(10)):
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(model, x.cuda(), y.cuda()) * (float("inf") if i in (3, 4) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))


def slow_side(fusion):
    """Keep the second stream busy, so that its updates run much later than the main stream's next operations."""
    for side in fusion._engine._updates.pending._sides.values():
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)


@pytest.mark.parametrize("scaled", [False, True])
def test_updates_that_run_late_see_the_numbers_of_their_step(scaled):
    """A schedule that fills lr in place, a scaler that changes its scale, and memory that is used again."""

    def run(mode):
        model = make_net(cls=Wide).cuda()
        optimizer = FORMS["fused, lr a tensor"](model.parameters())
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=1, enabled=scaled)
        fusion = fuse(model, optimizer, mode) if mode else None
        for i, (x, y) in enumerate(batches(8)):
            scaler.scale(loss_of(model, x.cuda(), y.cuda()) * (float("inf") if scaled and i == 4 else 1.0)).backward()
            if fusion:
                slow_side(fusion)
            scaler.step(optimizer)
            scaler.update()
            torch.full((64,), float("inf"), device="cuda")
            optimizer.param_groups[0]["lr"].mul_(0.5)
            optimizer.zero_grad()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))


@pytest.mark.parametrize("slow", ["main", "side"])
def test_updates_wait_for_gradients_and_uses_for_updates(slow):
    def run(mode):
        model = make_net(cls=Wide).cuda()
        optimizer = FORMS["fused"](model.parameters())
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(6):
            loss = loss_of(model, x.cuda(), y.cuda())
            if slow == "main":
                torch.cuda._sleep(20_000_000)
            elif fusion:
                slow_side(fusion)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("mode", MODES)
def test_no_host_synchronisation_in_a_step(mode):
    model = make_net(cls=Wide).cuda()
    optimizer = FORMS["fused"](model.parameters())
    data = [(x.cuda(), y.cuda()) for x, y in batches(6)]
    with fuse(model, optimizer, mode):
        for i, (x, y) in enumerate(data):
            torch.cuda.set_sync_debug_mode("error" if i >= 2 else "default")
            try:
                loss_of(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_updates_run_on_a_second_stream_and_reads_wait_for_them():
    model = make_net(cls=Wide).cuda()
    optimizer = FORMS["fused"](model.parameters())
    stock = make_net(cls=Wide).cuda()
    stock_optimizer = FORMS["fused"](stock.parameters())
    with fuse(model, optimizer, "forward") as fusion:
        for x, y in batches(5):
            for m, o in ((model, optimizer), (stock, stock_optimizer)):
                o.zero_grad()
                loss_of(m, x.cuda(), y.cuda()).backward()
                o.step()
            assert torch.equal(model[4].weight.detach(), stock[4].weight.detach())
            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                seen = model[2].weight.detach().clone()
            other.synchronize()
            assert torch.equal(seen, stock[2].weight)
        assert fusion._engine._updates.pending._sides


def test_backward_frees_gradients():
    def peak(mode):
        torch.cuda.empty_cache()
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))).cuda()
        optimizer = optim.SGD(model.parameters(), lr=0.01, fused=True)
        fusion = fuse(model, optimizer, mode) if mode else None
        x = torch.randn(4, 1024, device="cuda")
        for i in range(4):
            if i == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        if fusion:
            fusion.detach()
        return torch.cuda.max_memory_allocated() - before

    gradients = 16 * 4 * 1024 * 1024
    assert peak(None) - peak("backward") > 0.8 * gradients
