"""Fused training is stock training, bit for bit: every optimizer in every form, both modes."""

import pytest
import torch
from torch import optim

from fusion.loops import adamw, assert_same, train

MODES = ("backward", "forward")
FORMS = {"plain": {"foreach": False}, "foreach": {"foreach": True}}

ADAMS = {
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
}
CASES = {
    "SGD": lambda p, **f: optim.SGD(p, lr=0.1, **f),
    "SGD momentum decay": lambda p, **f: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **f),
    "SGD nesterov": lambda p, **f: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **f),
    "SGD maximize dampening": lambda p, **f: optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.5, maximize=True, **f),
    **{name: lambda p, c=cls, **f: c(p, lr=0.01, weight_decay=0.02, **f) for name, cls in ADAMS.items()},
    "Adam amsgrad": lambda p, **f: optim.Adam(p, lr=0.01, amsgrad=True, **f),
    "AdamW amsgrad maximize": lambda p, **f: optim.AdamW(p, lr=0.01, amsgrad=True, maximize=True, **f),
    "Adagrad": lambda p, **f: optim.Adagrad(p, lr=0.01, lr_decay=0.1, **f),
    "Adadelta": lambda p, **f: optim.Adadelta(p, **f),
    "RMSprop": lambda p, **f: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True, **f),
    "Rprop": lambda p, **f: optim.Rprop(p, **f),
    "ASGD": lambda p, **f: optim.ASGD(p, lr=0.01, t0=2, **f),
    "Adafactor": lambda p, **f: optim.Adafactor(p, lr=0.01, **f),
}
FUSED = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, fused=True),
}


def groups(model):
    """Three groups with hyperparameters of their own, one of them of two parameters far apart."""
    named = dict(model.named_parameters())
    return [
        {"params": [named.pop("inner.weight"), named.pop("head.bias")]},
        {"params": [p for name, p in named.items() if "norm" in name], "lr": 0.003},
        {"params": [p for name, p in named.items() if "norm" not in name], "lr": 0.02},
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_plain_and_foreach_forms(case, form, mode):
    def make(model):
        return CASES[case](model.parameters(), **FORMS[form])

    assert_same(train(make), train(make, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", FUSED)
def test_fused_form(case, dtype, mode):
    def make(model):
        if case == "SGD" and dtype is torch.bfloat16:
            # With momentum, torch's kernel for this dtype does not agree with itself from run to run.
            return optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01, fused=True)
        return FUSED[case](model.parameters())

    assert_same(train(make, dtype=dtype), train(make, mode, dtype=dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["SGD momentum decay", "AdamW", "Adagrad", "RMSprop"])
def test_groups_with_their_own_hyperparameters(case, mode):
    def make(model):
        return CASES[case](groups(model), foreach=True)

    assert_same(train(make), train(make, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["SGD momentum decay", "AdamW", "RAdam", "Adafactor"])
def test_bfloat16_parameters(case, mode):
    def make(model):
        return CASES[case](model.parameters(), foreach=True)

    assert_same(train(make, dtype=torch.bfloat16), train(make, mode, dtype=torch.bfloat16))


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_lr_that_schedulers_change_in_place(mode):
    def make(model):
        return optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)

    def scheduler(optimizer):
        return optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    assert_same(train(make, make_scheduler=scheduler), train(make, mode, make_scheduler=scheduler))


class Lion(optim.Optimizer):
    """A third-party optimizer in the usual style."""

    def __init__(self, params, lr=0.001, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(torch.sign(momentum.lerp(p.grad, 1 - group["beta"])), alpha=group["lr"])
                momentum.lerp_(p.grad, 0.01)


class LoudLion(Lion):
    """A subclass with attributes that the base class does not know."""

    def __init__(self, params):
        super().__init__(params)
        self.volume = 11


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", [Lion, LoudLion])
def test_third_party_optimizers(cls, mode):
    def make(model):
        return cls(model.parameters())

    assert_same(train(make), train(make, mode))


class Plateau(optim.lr_scheduler.ReduceLROnPlateau):
    """Steps on a metric that never improves."""

    def __init__(self, optimizer):
        super().__init__(optimizer, patience=0, factor=0.5)

    def step(self):
        super().step(1.0)


SCHEDULERS = {
    "StepLR": lambda o: optim.lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR (momentum too)": lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "CosineAnnealingLR": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 6),
    "CyclicLR (momentum too)": lambda o: optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "LambdaLR": lambda o: optim.lr_scheduler.LambdaLR(o, lambda i: 0.9**i),
    "MultiplicativeLR": lambda o: optim.lr_scheduler.MultiplicativeLR(o, lambda i: 0.8),
    "MultiStepLR": lambda o: optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "PolynomialLR": lambda o: optim.lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=2),
    "ReduceLROnPlateau": lambda o: Plateau(o),
    "ChainedScheduler": lambda o: optim.lr_scheduler.ChainedScheduler(
        [optim.lr_scheduler.ConstantLR(o, total_iters=2), optim.lr_scheduler.ExponentialLR(o, 0.7)]
    ),
    "LinearLR": lambda o: optim.lr_scheduler.LinearLR(o, total_iters=4),
    "SequentialLR": lambda o: optim.lr_scheduler.SequentialLR(
        o, [optim.lr_scheduler.ConstantLR(o), optim.lr_scheduler.ExponentialLR(o, 0.7)], [3]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name, mode):
    def make(model):
        return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    assert_same(train(make, make_scheduler=SCHEDULERS[name]), train(make, mode, make_scheduler=SCHEDULERS[name]))


def test_clipping_by_norm_is_exact_under_forward():
    def clip(model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    assert_same(train(adamw, before_step=clip), train(adamw, "forward", before_step=clip))


def test_clipping_by_value_is_exact_under_forward():
    def clip(model):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)

    assert_same(train(adamw, before_step=clip), train(adamw, "forward", before_step=clip))
