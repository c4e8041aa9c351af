"""The authors' rules, published and as coded, against slow trainings written from the formulas."""

import pytest
import torch
from torch import nn

from gradweave.optim import Eva, EvaF, EvaS
from optim.models import loss_of, make_mlp, rows, weights
from reference.eva import SlowTraining

RULES = {"eva": Eva, "eva-f": EvaF, "eva-s": EvaS}


def make_small_conv():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), nn.ReLU(), nn.Conv2d(3, 2, 2, dilation=2), nn.Flatten(),
        nn.Linear(2 * 2 * 2, 3),
    ).double()  # fmt: skip


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("foreach", [True, False])
def test_every_step_is_that_of_the_slow_training(kind, rule, reference, foreach):
    if kind == "mlp":
        model, other, batches = make_mlp(torch.float64), make_mlp(torch.float64), rows(5, 20, torch.float64)
    else:
        model, other = make_small_conv(), make_small_conv()
        batches = [torch.randn(20, 2, 8, 8, dtype=torch.float64) for _ in range(5)]
    settings = {"lr": 0.05, "damping": 0.3, "weight_decay": 0.01}
    mode = {"reference": True} if reference else {"faithful": True}
    optimizer = RULES[rule](model, foreach=foreach, **settings, **mode)
    slow = SlowTraining(other, rule, reference=reference, **settings)
    for x in batches:
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        other.zero_grad()
        loss_of(other, x).backward()
        slow.step()
        assert torch.allclose(weights(model), weights(other), rtol=1e-5, atol=1e-7)
    assert (
        weights(model) - weights(make_mlp(torch.float64) if kind == "mlp" else make_small_conv())
    ).abs().max() > 1e-3


def test_the_authors_code_looks_at_sixteen_samples():
    batch = rows(1, 40)[0]
    model, changed = make_mlp(), make_mlp()
    records = []
    for net, x in ((model, batch), (changed, torch.cat([batch[:16], batch[16:] * 3]))):
        optimizer = EvaF(net, lr=0.0, reference=True)
        loss_of(net, x).backward()
        records.append(optimizer.state[net[0].weight]["record"].clone())
    assert torch.equal(records[0], records[1])
    assert records[0][-1] == 16


def test_the_clip_makes_the_step_independent_of_lr():
    results = []
    for lr in (0.5, 5.0):
        model = make_mlp()
        optimizer = Eva(model, lr=lr, reference=True, momentum=0.0)
        loss_of(model, rows(1)[0]).backward()
        optimizer.step()
        results.append(weights(model))
    assert torch.allclose(results[0], results[1], atol=1e-6)
