"""Steps of subsets are the optimizer's own step, bit for bit, on a stand-in."""

import pytest
import torch
from torch import nn, optim

from gradweave._runtime.optimizer_steps.partial import PartialStepper, no_autocast, with_default_type


def make(cls, **options):
    torch.manual_seed(0)
    first, second = [nn.Parameter(torch.randn(3)) for _ in range(3)], [nn.Parameter(torch.randn(2))]
    optimizer = cls([{"params": first}, {"params": second, "lr": 0.5}], lr=0.1, **options)
    for p in (*first, *second):
        p.grad = torch.randn_like(p)
    return optimizer, first, second


@pytest.mark.parametrize(("cls", "options"), [(optim.SGD, {"momentum": 0.9}), (optim.AdamW, {}), (optim.RMSprop, {})])
def test_parts_are_the_whole(cls, options):
    whole, *_ = make(cls, **options)
    parts, first, second = make(cls, **options)
    stepper = PartialStepper(parts)
    for _ in range(3):
        whole.step()
        stepper.step({0: first[1:]})
        stepper.step({0: first[:1], 1: second})
    for ours, stock in zip(parts.param_groups, whole.param_groups, strict=True):
        assert all(map(torch.equal, ours["params"], stock["params"]))
    assert len(parts.state) == 4


def test_hooks_do_not_run_and_the_optimizer_is_not_touched():
    optimizer, first, _ = make(optim.SGD)
    calls, groups = [], list(optimizer.param_groups)
    optimizer.register_step_pre_hook(lambda *_: calls.append(None))
    PartialStepper(optimizer).step({0: first})
    PartialStepper(optimizer).step_nothing()
    assert calls == []
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    assert len(optimizer.param_groups[0]["params"]) == 3


def test_an_update_is_neither_cast_nor_of_another_default_type():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.ones(2, 2)
        assert (x @ x).dtype is torch.bfloat16
        with no_autocast(torch.device("cpu")):
            assert (x @ x).dtype is torch.float32
    with with_default_type(torch.float64):
        assert torch.tensor(1.0).dtype is torch.float64
    assert torch.tensor(1.0).dtype is torch.float32
