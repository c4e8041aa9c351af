"""SGD and AdamW for parameters without vectors: torch's own, in float32 whatever the parameter's precision."""

import copy

import pytest
import torch
from torch import nn

from gradweave.optim import Eva, EvaF, EvaS, first_order
from optim.models import loss_of


class Mixed(nn.Module):
    """Layers, an embedding, a norm and a lone parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.linear(self.norm(self.embedding(x))) * self.scale


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
@pytest.mark.parametrize("maximize", [True, False])
def test_the_first_order_rule_is_torchs(rule, maximize):
    torch.manual_seed(0)
    model = Mixed()
    other = copy.deepcopy(model)
    options = {"first_order": rule, "first_order_lr": 0.01, "first_order_weight_decay": 0.1, "maximize": maximize}
    optimizer = EvaF(model, **options)
    others = [other.embedding.weight, *other.norm.parameters(), other.scale]
    settings = {"lr": 0.01, "weight_decay": 0.1, "maximize": maximize}
    stock = (
        torch.optim.AdamW(others, **settings) if rule == "adamw" else torch.optim.SGD(others, momentum=0.9, **settings)
    )
    for step in range(4):
        x = torch.tensor([0, 1, 2, step])
        loss_of(model, x).backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        stock.step()
        optimizer.zero_grad()
        for p in (model.linear.weight, model.linear.bias):
            p.data.zero_()
    for name in ("embedding.weight", "norm.weight", "norm.bias", "scale"):
        assert torch.allclose(model.get_parameter(name), other.get_parameter(name), atol=1e-6)


FAMILY = [Eva, EvaF, EvaS]


every = pytest.mark.parametrize("cls", FAMILY)


def are_finite(model):
    return all(p.isfinite().all() for p in model.parameters())


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_low_precision_parameters_without_vectors(cls, dtype, rule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(dtype)
    optimizer = cls(model, lr=0.01, first_order=rule)
    for _ in range(5):
        (model(torch.arange(5)).float().square().mean() * 1e-4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert are_finite(model)
    state = optimizer.state[model[1].weight]
    if rule == "adamw":
        assert state["exp_avg_sq"].dtype is state["exp_avg"].dtype is torch.float32
        assert state["exp_avg_sq"].count_nonzero() > 0
    elif dtype is torch.float16:
        assert state["momentum_buffer"].dtype is torch.float32
    other = cls(model, lr=0.01, first_order=rule)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[model[1].weight].keys() == state.keys()
    for key, value in other.state[model[1].weight].items():
        assert value.dtype is state[key].dtype
        assert torch.equal(value, state[key])


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_a_step_that_is_left_out_changes_nothing(rule):
    """Not even where the gradient holds NaN, whose product with 0 is NaN."""
    torch.manual_seed(0)
    p, state = torch.randn(3), {}
    group = {"rule": rule, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    first_order.prepare(p, state, rule)
    first_order.update(p, torch.randn(3), state, group, torch.tensor(True))
    before, kept = p.clone(), {key: value.clone() for key, value in state.items()}
    first_order.update(p, torch.full((3,), torch.nan), state, group, torch.tensor(False))
    assert torch.equal(p, before)
    assert all(torch.equal(state[key], value) for key, value in kept.items())
