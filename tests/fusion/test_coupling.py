"""Optimizers that couple parameters are found before they train; independent ones pass."""

import pytest
import torch
from torch import optim

from fusion.loops import make_net
from gradweave.errors import ArgumentError
from gradweave.fusion import fuse
from gradweave.fusion.coupling import check_independent


class Simple(optim.Optimizer):
    def __init__(self, params, **more):
        super().__init__(params, {"lr": 0.1, **more})

    def direction(self, group, p):
        return p.grad

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(group, p), alpha=group["lr"])


class GlobalNorm(Simple):
    """Scales by the norm over all gradients, as LAMB's trust ratio or Prodigy do in their ways."""

    def direction(self, group, p):
        grads = [q.grad for g in self.param_groups for q in g["params"] if q.grad is not None]
        return p.grad / torch.nn.utils.get_total_norm(grads)


class GroupCounter(Simple):
    """Counts steps once per group."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["step"])


class OwnCounter(Simple):
    """Counts steps once per optimizer."""

    count = 0

    def direction(self, group, p):
        return p.grad / (1 + self.count)

    def step(self, closure=None):
        super().step(closure)
        self.count += 1


class NeedsParams(Simple):
    """Cannot be stepped with nothing to do."""

    def step(self, closure=None):
        max(p.numel() for group in self.param_groups for p in group["params"])
        super().step(closure)


@pytest.mark.parametrize("cls", [GlobalNorm, GroupCounter, OwnCounter])
def test_coupled_optimizers_are_refused_with_the_reason(cls):
    model = make_net()
    with pytest.raises(ArgumentError, match=f"optimizer='{cls.__name__}': couples its parameters"):
        fuse(model, cls(model.parameters()), "forward")


def test_what_cannot_be_stepped_in_parts_is_refused():
    model = make_net()
    with pytest.raises(ArgumentError, match="optimizer='NeedsParams': cannot be stepped in parts"):
        fuse(model, NeedsParams(model.parameters()), "forward")


@pytest.mark.parametrize("form", [{}, {"foreach": True}, {"fused": True}, {"capturable": False, "amsgrad": True}])
def test_independent_optimizers_pass(form):
    check_independent(optim.AdamW(make_net().parameters(), **form))
    check_independent(Simple(make_net().parameters()))


def test_the_probe_leaves_the_optimizer_as_it_was():
    model = make_net()
    optimizer = optim.AdamW(
        [{"params": list(model.inner.parameters())}, {"params": list(model.head.parameters()), "lr": 1.0}]
    )
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    check_independent(optimizer)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert torch.equal(p.grad, grads[name])
    for p, s in optimizer.state.items():
        assert all(torch.equal(v, state[id(p)][k]) for k, v in s.items())
    assert len(optimizer.param_groups) == 2
    assert len(optimizer.state) == 4


def test_the_global_random_state_is_not_touched():
    model = make_net()
    before = torch.get_rng_state()
    check_independent(optim.AdamW(model.parameters()))
    assert torch.equal(torch.get_rng_state(), before)
