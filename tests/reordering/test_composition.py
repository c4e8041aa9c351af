"""reorder() beside everything else: it works, or it raises."""

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import gradweave
from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.reordering.api import is_reordered, reorder
from reordering.test_cross_step import crossing_costs, net

POLICIES = ["side_stream", "joint", "cross_step"]


def attach(model, optimizer, policy, fused=None):
    if policy == "cross_step":
        fused = "forward"
    if fused is not None:
        gradweave.fuse(model, optimizer, fused)
    return reorder(model, policy, **({} if policy == "side_stream" else {"costs": crossing_costs(model)}))


def train(policy, *, make=net, fused=None, before_step=lambda model: None, steps=6):
    model = make()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    handle = attach(model, optimizer, policy, fused) if policy else None
    for number in range(steps):
        model(torch.full((3, 4), 0.2 * number)).square().sum().backward()
        before_step(model)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], handle


def check(policy, **options):
    made, handle = train(policy, **options)
    options.pop("fused", None)
    expected, _ = train(None, **options)
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert handle.most_bytes_held > 0


@pytest.mark.parametrize(
    ("policy", "fused"),
    [("side_stream", "forward"), ("side_stream", "backward"), ("joint", "forward"), ("joint", "backward"),
     ("joint", "auto"), ("cross_step", "forward")],
)  # fmt: skip
def test_fuse(policy, fused):
    check(policy, fused=fused, steps=40 if fused == "auto" else 6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_that_is_kept_up_to_the_next_forward_keeps_no_update_from_waiting(policy):
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer, policy, "forward")
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(3, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(type(p) is not nn.Parameter for p in model.parameters())
    assert loss.isfinite()


def test_backward_fusion_updates_right_after_each_weight_gradient():
    """Gradients are gone when backward returns: every update has come right after its own weight gradient."""
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    handle = attach(model, optimizer, "side_stream", "backward")
    for number in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.ones(3, 4)).square().sum().backward()
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(moved) == (number > 0)
        assert handle._queue.held_bytes == 0
        optimizer.step()
        optimizer.zero_grad()


def checkpointed():
    model = net()
    first, rest = model[:4], model[4:]

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = first, rest

        def forward(self, x):
            return self.rest(checkpoint(self.first, x, use_reentrant=False))

    return Checkpointed()


@pytest.mark.parametrize("policy", POLICIES)
def test_activation_checkpointing(policy):
    check(policy, make=checkpointed)


@pytest.mark.parametrize("policy", POLICIES)
def test_clipping(policy):
    check(policy, before_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradient_scaling(policy):
    def run(policy):
        model = net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        if policy:
            attach(model, optimizer, policy)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(6):
            loss = model(torch.full((2, 4), 0.1 * number)).sum() * (float("inf") if number == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(policy), run(None), strict=True))


def test_a_model_that_is_compiled_after_it_runs_in_stock_order():
    def run(reordered):
        model = net()
        handle = reorder(model, "side_stream") if reordered else None
        forward = torch.compile(model, backend="eager", fullgraph=True)
        forward(torch.ones(2, 4)).sum().backward()
        assert handle is None or handle.most_bytes_held == 0
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_a_compiled_step_has_its_own_order():
    model = net()
    step = gradweave.compile(model, lambda m, x: m(x).sum(), optim.SGD(model.parameters(), lr=0.1), lower="replay")
    reorder(model, "side_stream")
    for _ in range(4):
        step(torch.ones(2, 4))
    expected = net()
    optimizer = optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(4):
        expected(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize("first", ["reorder", "daso"])
def test_daso_of_one_process(first):
    def run(woven):
        model = net()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        makers = [lambda: reorder(model, "side_stream"), lambda: gradweave.DASO(model, optimizer)]
        made = [make() for make in (makers if first == "reorder" else makers[::-1])] if woven else []
        for number in range(5):
            model(torch.full((3, 4), 0.2 * number)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for one in made:
            if isinstance(one, gradweave.DASO):
                one.finish()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_crossing_a_step_border_under_ddp_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(net())
        gradweave.fuse(model, optim.SGD(model.parameters(), lr=0.1), "forward")
        with pytest.raises(ArgumentError, match=r'before backward\(\) returns; use policy="joint"'):
            reorder(model, "cross_step", costs=crossing_costs(model))
    finally:
        torch.distributed.destroy_process_group()


def test_fsdp_is_refused(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = net()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedError, match="FSDP"):
            reorder(model, "side_stream")
    finally:
        torch.distributed.destroy_process_group()


def test_a_second_one_is_refused_on_a_part_and_on_the_whole():
    model = net()
    with reorder(model[0], "side_stream"), pytest.raises(UnsupportedError, match="already"):
        reorder(model, "side_stream")
    assert not is_reordered(model)
    reorder(model, "side_stream").detach()
