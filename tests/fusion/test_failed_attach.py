"""An attach that fails at any point leaves model and optimizer as they were."""

import pytest
import torch
from torch import nn

from fusion.loops import adamw, assert_same, batches, loss_of, make_net, train
from gradweave.errors import ArgumentError, UnsupportedError
from gradweave.fusion import api, fuse

REGISTERS = [
    (nn.Module, "register_forward_pre_hook"),
    (nn.Module, "register_load_state_dict_post_hook"),
    (torch.Tensor, "register_post_accumulate_grad_hook"),
    (torch.optim.Optimizer, "register_step_pre_hook"),
    (torch.optim.Optimizer, "register_step_post_hook"),
    (torch.optim.Optimizer, "register_state_dict_pre_hook"),
    (torch.optim.Optimizer, "register_load_state_dict_pre_hook"),
    (torch.optim.Optimizer, "register_load_state_dict_post_hook"),
]


class OutOfLuck(Exception):
    pass


def traces(model, optimizer):
    return (
        [len(m._forward_pre_hooks) + len(m._load_state_dict_post_hooks) for m in model.modules()],
        [(type(p), len(p._post_accumulate_grad_hooks or {}), vars(p)) for p in model.parameters()],
        {name: len(value) for name, value in vars(optimizer).items() if name.startswith("_optimizer_")},
        [name for name in vars(optimizer) if name.startswith("_gradweave")],
    )


@pytest.mark.parametrize("mode", ["forward", "backward", "auto", "auto with backward"])
def test_a_failed_attach_leaves_nothing_attached(monkeypatch, mode):
    model = make_net()
    optimizer = adamw(model)
    before = traces(model, optimizer)
    calls = 0
    fails_at = None

    def failing(register):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise OutOfLuck
            return register(*args, **kwargs)

        return call

    for owner, name in REGISTERS:
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    claim = api.claim_optimizer
    monkeypatch.setattr(api, "claim_optimizer", failing(claim))
    fails_at = 0
    failures = 0
    while True:
        fails_at += 1
        calls = 0
        try:
            fusion = fuse(model, optimizer, mode.split()[0], allow_backward="with backward" in mode)
        except OutOfLuck:
            failures += 1
            assert traces(model, optimizer) == before, fails_at
        else:
            break
    assert failures > 8
    fails_at = None
    fusion.detach()
    assert traces(model, optimizer) == before
    for x, y in batches(6):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same((model, optimizer), train(adamw))


@pytest.mark.parametrize("mode", ["forward", "backward", "auto"])
def test_a_lazy_module_is_refused_until_it_has_run(mode):
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="run a batch through the model first"):
        fuse(model, optimizer, mode)
    model(torch.ones(1, 6))
    fuse(model, optimizer, mode).detach()


def test_backward_only_where_auto_may_try_it():
    model = make_net()
    with pytest.raises(ArgumentError, match="allow_backward=True: is for mode="):
        fuse(model, adamw(model), "forward", allow_backward=True)


@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_an_optimizer_that_a_framework_has_wrapped(framework):
    def run(mode):
        model = make_net()
        optimizer = adamw(model)
        wrapped = optimizer
        if framework == "accelerate":
            from accelerate import Accelerator

            wrapped = Accelerator(cpu=True).prepare(optimizer)
        elif mode:
            from lightning.pytorch.core.optimizer import LightningOptimizer

            wrapped = LightningOptimizer(optimizer)
        fusion = fuse(model, wrapped, mode) if mode else None
        for x, y in batches(6):
            loss_of(model, x, y).backward()
            (wrapped if framework == "accelerate" else optimizer).step()
            optimizer.zero_grad()
        if fusion:
            assert fusion.optimizer is optimizer
            fusion.detach()
        return model, optimizer

    for mode in ("forward", "backward", "auto"):
        assert_same(run(mode), run(None))
