"""Compiled steps on two ranks that average gradients, against DistributedDataParallel.

A function above a test runs on every rank, and returns what its test looks at.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradweave
from parallel.data_parallel.models import batch, make, optimizer_of
from worlds import World


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two ranks."""
    world = World(tmp_path_factory.mktemp("two"), 2, 1)
    yield world
    world.close()


def loss_fn(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def result_of(model, opt, losses, norms):
    state = [s[key].clone() for s in opt.state.values() for key in sorted(s)]
    return {
        "weights": [p.detach().clone() for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "state": state, "losses": losses, "norms": norms,
    }  # fmt: skip


def with_ddp(kind, optimizer, *, steps=5, accumulate=1, clip=None, scaled=False, change=None):
    """Train as one does without gradweave."""
    model, rank = make(kind), dist.get_rank()
    opt = optimizer_of(model.parameters(), optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if scaled else None
    wrapped = DistributedDataParallel(model, find_unused_parameters=kind == "tied")
    losses, norms = [], []
    for step in range(steps):
        if change is not None and change(step, model):
            wrapped = DistributedDataParallel(model)
        for part in range(accumulate):
            x, y = batch(kind, 10 * step + part, rank)
            wrapped.require_backward_grad_sync = part == accumulate - 1
            loss = loss_fn(wrapped, x, y)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(opt)
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        opt.step() if scaler is None else scaler.step(opt)
        if scaler is not None:
            scaler.update()
        opt.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return result_of(model, opt, losses, norms)


def compiled(
    kind, optimizer, *, lower, steps=5, accumulate=1, clip=None, scaled=False, change=None, differ=False, **options
):
    """Train by one compiled step; return the same, and how steps were taken."""
    model, rank = make(kind), dist.get_rank()
    if differ:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
    opt = optimizer_of(model.parameters(), optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if scaled else None
    step_of = gradweave.compile(
        model, loss_fn, opt, mesh=dist.group.WORLD, max_grad_norm=clip, scaler=scaler, lower=lower, **options
    )
    losses, norms = [], []
    for step in range(steps):
        if change is not None:
            change(step, model)
        for part in range(accumulate - 1):
            with step_of.no_update():
                step_of(*batch(kind, 10 * step + part, rank))
        losses.append(step_of(*batch(kind, 10 * step + accumulate - 1, rank)).item())
        if clip is not None:
            norms.append(step_of.grad_norm.item())
        schedule.step()
    result = result_of(model, opt, losses, norms)
    result |= {"reason": step_of.eager_reason, "explain": step_of.explain()}
    step_of.detach()
    return result


def both(**options):
    ways = {"lower": options.pop("lower", "replay")}
    ways |= {key: options.pop(key) for key in ("differ",) if key in options}
    return with_ddp(**options), compiled(**options, **ways)


def assert_same(results, *, tolerance=None):
    """Compare both ways on each rank, and the weights of all ranks."""
    for expected, made in results.values():
        assert made["reason"] is None
        assert made["explain"].startswith("lower=")
        for key in ("weights", "buffers", "state"):
            assert len(made[key]) == len(expected[key])
            for one, other in zip(made[key], expected[key], strict=True):
                if tolerance is None:
                    assert torch.equal(one, other), (key, (one - other).abs().max())
                else:
                    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        if tolerance is None:
            assert (made["losses"], made["norms"]) == (expected["losses"], expected["norms"])
    weights = [made["weights"] for _, made in results.values()]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", ["mlp", "conv", "gpt"])
def test_replayed_steps_are_those_of_ddp_bit_for_bit(two, kind, optimizer):
    results = two.run(both, kind=kind, optimizer=optimizer)
    assert_same(results)
    assert "1 graph(s)" in results[0][1]["explain"]


def test_weights_that_differ_at_first_become_those_of_the_first_rank(two):
    assert_same(two.run(both, kind="mlp", optimizer="sgd", differ=True))


def test_a_weight_used_twice_one_frozen_and_one_unused(two):
    results = two.run(both, kind="tied", optimizer="adamw")
    assert_same(results)
    assert "1 graph(s)" in results[0][1]["explain"]


def test_micro_batches_are_averaged_once_with_the_last(two):
    assert_same(two.run(both, kind="conv", optimizer="adamw", accumulate=3))


def test_the_common_norm_is_that_of_averages(two):
    assert_same(two.run(both, kind="mlp", optimizer="sgd", clip=0.05))


def test_a_loss_scale_is_the_same_on_all_ranks(two):
    assert_same(two.run(both, kind="mlp", optimizer="sgd", scaled=True, clip=0.05))


def test_compiled_steps_are_those_of_ddp_to_rounding(two):
    assert_same(two.run(both, kind="mlp", optimizer="sgd", lower="inductor", clip=0.5), tolerance=1e-5)
