"""Optimizers that couple parameters are found before they train; independent ones pass."""

import logging

import pytest
import torch
from torch import optim

from fusion.loops import announce_again, assert_same, batches, loss_of, make_net
from gradweave._runtime.optimizer_steps.independence import check_independent
from gradweave.errors import UnsupportedError
from gradweave.fusion import fuse


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

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(group, p), alpha=group["lr"])
        self.count += 1


class ClassCounter(Simple):
    """Counts the steps of all its instances."""

    total = 0

    def direction(self, group, p):
        ClassCounter.total += 1
        return p.grad


class Lookahead(Simple):
    """Counts in its groups, and acts on the count in every fifth step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["counter"] = group.get("counter", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    slow = self.state[p].setdefault("slow", p.detach().clone())
                    p.sub_(p.grad, alpha=group["lr"])
                    if group["counter"] % 5 == 0:
                        p.copy_(slow.lerp_(p, 0.5))


class GlobalClip(Simple):
    """Scales by the norm over all gradients, if that is large."""

    def direction(self, group, p):
        grads = [q.grad for g in self.param_groups for q in g["params"] if q.grad is not None]
        return p.grad / max(1.0, float(torch.nn.utils.get_total_norm(grads)) / 1e6)


class SkipsBadGradients(Simple):
    """Takes a step with all gradients or none."""

    def direction(self, group, p):
        grads = [q.grad for g in self.param_groups for q in g["params"] if q.grad is not None]
        return p.grad if all(bool(grad.isfinite().all()) for grad in grads) else torch.zeros_like(p)


class ClipsLarge(Simple):
    """Treats large parameters together, and only these."""

    def direction(self, group, p):
        large = [q.grad for g in self.param_groups for q in g["params"] if q.grad is not None and q.numel() > 40]
        return p.grad / torch.stack([g.norm() for g in large]).sum() if p.numel() > 40 else p.grad


class NoisyIfLarge(Simple):
    """Adds noise to large gradients."""

    def direction(self, group, p):
        return p.grad + torch.randn_like(p.grad) if p.numel() > 40 else p.grad


class Noisy(Simple):
    def direction(self, group, p):
        return p.grad + torch.randn_like(p.grad)


class Logs(Simple):
    """Does something around its parent's step, which would be done with other gradients."""

    def step(self, closure=None):
        self.last = sum(float(p.grad.norm()) for g in self.param_groups for p in g["params"] if p.grad is not None)
        super().step(closure)


class KeepsAnObject(Simple):
    def __init__(self, params):
        super().__init__(params)
        self.schedule = iter([0.1, 0.2])

    def direction(self, group, p):
        return p.grad


class TrustRatio(Simple):
    """Asks for values, of one parameter at a time: independent."""

    def direction(self, group, p):
        norm = p.grad.norm().item()
        return p.grad * (p.norm().item() / norm) if norm > 0 else p.grad


class SharesState(Simple):
    """Has one count for all in the state of each."""

    def __init__(self, params):
        super().__init__(params)
        count = torch.zeros(())
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = count

    def direction(self, group, p):
        return p.grad / self.state[p]["count"].add_(1)


class KeepsGradients(Simple):
    """Adds up the last gradients, of which it has no copies."""

    def direction(self, group, p):
        last = self.state[p]["last"] = [*self.state[p].get("last", []), p.grad][-3:]
        return torch.stack(last).sum(0)


class NeedsParams(Simple):
    """Cannot be stepped with nothing to do."""

    @torch.no_grad()
    def step(self, closure=None):
        max(p.numel() for group in self.param_groups for p in group["params"])


FAULTS = {
    GlobalNorm: "couples its parameters",
    SharesState: "couples its parameters",
    GroupCounter: r"writes param_groups\[0\]\['step'\]",
    OwnCounter: "writes its attribute 'count'",
    ClassCounter: "reads its class attribute 'total'",
    Lookahead: r"writes param_groups\[0\]\['counter'\]",
    GlobalClip: "couples its parameters .* as a gradient that is large shows",
    SkipsBadGradients: "couples its parameters .* as a gradient that is infinite shows",
    ClipsLarge: r"the update of one of shape \(6?8?, 8?6?\) depends on one of shape|depends on one of shape",
    Noisy: "draws random numbers",
    NoisyIfLarge: "draws random numbers",
    Logs: r"step\(\) that calls another's: what Logs\.step\(\) does",
    KeepsAnObject: "keeps a list_iterator in its attribute 'schedule'",
}


@pytest.mark.parametrize("cls", FAULTS)
def test_coupled_optimizers_are_refused_with_the_reason(cls):
    model = make_net()
    before = {name: value for name, value in vars(cls).items() if isinstance(value, int)}
    for mode in ("forward", "backward"):
        with pytest.raises(UnsupportedError, match=f"^{cls.__name__}: .*{FAULTS[cls]}.*; train without fuse"):
            fuse(model, cls(model.parameters()), mode)
    assert {name: value for name, value in vars(cls).items() if isinstance(value, int)} == before


@pytest.mark.parametrize("cls", FAULTS)
def test_under_auto_they_stay_in_stock_order(cls, caplog):
    def train(fused):
        model = make_net()
        optimizer = cls(model.parameters())
        torch.manual_seed(3)
        cls.total = 0
        fusion = fuse(model, optimizer) if fused else None
        for x, y in batches(8):
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        if fusion:
            assert "chose stock" in fusion.explain()
            fusion.detach()
        return model, optimizer

    announce_again()
    with caplog.at_level(logging.WARNING, logger="gradweave"):
        trained = train(True)
    assert [record.getMessage().startswith("fuse: updates stay at step()") for record in caplog.records] == [True]
    assert_same(trained, train(False))


@pytest.mark.parametrize("options", [{"mode": "forward"}, {"mode": "auto"}, {"mode": "auto", "allow_backward": True}])
def test_gradients_that_an_optimizer_keeps_are_what_zero_grad_makes_of_them(options):
    def train(fused):
        model = make_net()
        optimizer = KeepsGradients(model.parameters())
        fusion = fuse(model, optimizer, **options) if fused else None
        for i, (x, y) in enumerate(batches(60)):
            optimizer.zero_grad(set_to_none=i % 3 == 0)
            loss_of(model, x, y).backward()
            optimizer.step()
        if fusion:
            fusion.detach()
        return model, optimizer

    model, optimizer = train(True)
    expected, stock = train(False)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert all(map(torch.equal, optimizer.state[p]["last"], stock.state[q]["last"]))


def test_backward_refuses_an_optimizer_that_keeps_gradients():
    model = make_net()
    with pytest.raises(UnsupportedError, match="KeepsGradients: keeps gradients in its state"):
        fuse(model, KeepsGradients(model.parameters()), "backward")


def test_what_cannot_be_stepped_in_parts_is_refused():
    model = make_net()
    with pytest.raises(UnsupportedError, match=r"^NeedsParams: cannot be stepped in parts"):
        fuse(model, NeedsParams(model.parameters()), "forward")


@pytest.mark.parametrize("form", [{}, {"foreach": True}, {"fused": True}, {"capturable": False, "amsgrad": True}])
def test_independent_optimizers_pass(form):
    check_independent(optim.AdamW(make_net().parameters(), **form), remedy="")
    check_independent(Simple(make_net().parameters()), remedy="")
    check_independent(TrustRatio(make_net().parameters()), remedy="")


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
    check_independent(optimizer, remedy="")
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
    check_independent(optim.AdamW(model.parameters()), remedy="")
    assert torch.equal(torch.get_rng_state(), before)


class CountsInItsThings(Simple):
    """Counts in a tensor, a dictionary and a list that are attributes."""

    def __init__(self, params):
        super().__init__(params)
        self.tensor, self.table, self.entries = torch.zeros(1), {"n": 0}, []

    def direction(self, group, p):
        self.tensor.add_(1)
        self.table["n"] += 1
        self.entries.append(1)
        return p.grad / (1 + self.table["n"])


def test_trials_leave_what_an_optimizer_keeps_alone():
    model = make_net()
    optimizer = CountsInItsThings(model.parameters())
    with pytest.raises(UnsupportedError, match="writes its attribute"):
        fuse(model, optimizer, "forward")
    assert (float(optimizer.tensor), optimizer.table, optimizer.entries) == (0.0, {"n": 0}, [])
