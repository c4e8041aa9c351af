"""Eva and Eva-f: vectors that are collected with gradients and used up by steps, and hooks that leave no trace."""

import copy

import pytest
import torch
from torch import nn

from gradweave.errors import GradweaveError
from gradweave.optim import Eva, EvaF
from optim.models import images, loss_of, make_conv, make_mlp, rows, train, weights

CAPTURED = [Eva, EvaF]


captured = pytest.mark.parametrize("cls", CAPTURED)


@captured
def test_layers_without_gradient_are_skipped(cls):
    model = nn.ModuleList([make_mlp(), nn.Linear(3, 3)])
    optimizer = cls(model)
    before = model[1].weight.clone()
    train(model[0], optimizer, rows(2))
    model[0][0].requires_grad_(False)
    frozen = model[0][0].weight.clone()
    train(model[0], optimizer, rows(2))
    assert torch.equal(before, model[1].weight)
    assert torch.equal(frozen, model[0][0].weight)


@captured
def test_gradients_that_are_thrown_away_take_their_vectors_with_them(cls):
    model, other = make_mlp(), make_mlp()
    first, second = cls(model), cls(other)
    loss_of(model, rows(1)[0] * 100).backward()
    first.zero_grad()
    assert train(model, first, rows()) == train(other, second, rows())


@captured
def test_a_step_uses_its_vectors_up_however_gradients_are_dropped(cls):
    model, other = make_mlp(), make_mlp()
    optimizer = cls(model)
    for x in rows():
        loss_of(model, x).backward()
        optimizer.step()
        model.zero_grad()
    train(other, cls(other), rows())
    assert torch.equal(weights(model), weights(other))


@captured
def test_micro_batches_give_the_step_of_the_batch(cls):
    model, other = make_mlp(torch.float64), make_mlp(torch.float64)
    options = {} if cls is EvaF else {"faithful": True, "lr": 0.02}
    whole, parts = cls(model, **options), cls(other, **options)
    for x in rows(3, dtype=torch.float64):
        train(model, whole, [x])
        for part in x.split(4):
            (loss_of(other, part) / 3).backward()
        parts.step()
        parts.zero_grad()
    assert torch.allclose(weights(model), weights(other), atol=1e-10)


def test_absolute_damping_takes_the_scale_off_output_vectors_or_refuses():
    model, other = make_mlp(), make_mlp()
    plain, scaled = (Eva(m, reference=True, lr=0.02) for m in (model, other))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(model, plain, rows(2))
    for x in rows(2):
        scaler.scale(loss_of(other, x)).backward()
        scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
    assert torch.allclose(weights(model), weights(other), atol=1e-6)
    weight = model[0].weight, other[0].weight
    assert torch.allclose(plain.state[weight[0]]["output_vector"], scaled.state[weight[1]]["output_vector"], rtol=1e-3)
    scaler.scale(loss_of(other, rows(1)[0])).backward()
    scaler.unscale_(scaled)
    with pytest.raises(GradweaveError, match="does not tell an optimizer the scale"):
        scaler.step(scaled)


@captured
def test_copies_and_detached_optimizers_refuse_to_step(cls):
    model = make_mlp()
    optimizer = cls(model)
    clone = copy.deepcopy(optimizer)
    for p in (p for group in clone.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    with pytest.raises(GradweaveError, match="has no hooks on a model"):
        clone.step()
    optimizer.detach()
    loss_of(model, rows(1)[0]).backward()
    with pytest.raises(GradweaveError, match="has no hooks on a model"):
        optimizer.step()


def test_channels_last():
    model, other = make_conv(), make_conv().to(memory_format=torch.channels_last)
    train(model, Eva(model), images(3))
    train(other, Eva(other), [x.to(memory_format=torch.channels_last) for x in images(3)])
    assert torch.allclose(weights(model), weights(other), atol=1e-4)


@captured
def test_groups_of_layers_in_any_order_with_no_limit(cls):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    params = [*model[1].parameters(), *model[0].parameters()]
    optimizer = cls(model, [{"params": params, "rule": "vectors"}], faithful=True, kl_clip=float("inf"), lr=1e-3)
    loss_of(model, torch.randn(6, 4)).backward()
    optimizer.step()
    assert weights(model).isfinite().all()


FAILING = [
    "gradweave.optim.eva.FusedStep",
    "gradweave.optim.eva._StatisticsOptimizer._attach",
    "gradweave.optim.base.VectorOptimizer.add_param_group",
    "gradweave.optim.statistics.coverage.hook_output_projections",
    "gradweave.optim.base.VectorOptimizer._enlist",
]


@pytest.mark.parametrize("failing", FAILING)
@captured
def test_an_optimizer_that_cannot_be_made_leaves_no_hook(cls, failing, monkeypatch):
    """Each step of making one fails in turn."""

    def fail(*_, **__):
        raise RuntimeError("failed")

    attention = nn.MultiheadAttention(8, 2)
    model = nn.ModuleList([make_mlp(), attention])
    with monkeypatch.context() as patch:
        patch.setattr(failing, fail)
        with pytest.raises(RuntimeError, match="failed"):
            cls(model)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    cls(model)


@captured
def test_a_hook_that_cannot_be_put_on_takes_the_others_along(cls, monkeypatch):
    model = make_mlp()
    stuck = model[4]
    monkeypatch.setattr(stuck, "register_forward_hook", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cls(model)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("bias", [True, False])
def test_the_leading_direction_is_found_before_a_norm_too(bias):
    """Where the mean of outputs' gradients is zero, and no vector of the published kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 16, 3, bias=bias), nn.BatchNorm2d(16), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(8, 2, 6, 6)
    model(x)
    optimizer = Eva(model, lr=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    weight = model[0].weight
    a = optimizer.state[weight]["input_vector"][0]
    X = weight.grad.flatten(1)
    if bias:
        a, X = torch.cat((a, torch.ones(1))), torch.cat((X, model[0].bias.grad[:, None]), 1)
    rest = X - torch.outer(X @ a, a) / (1.01 * a @ a)
    leading = torch.linalg.svd(rest).U[:, 0]
    found = optimizer.state[weight]["output_vector"][0]
    assert float((found * leading).sum().abs()) > 0.999
    assert float(torch.linalg.vector_norm(found)) == pytest.approx(1, abs=1e-5)


def test_layers_of_few_outputs_and_transposed_ones_have_none():
    layers = [nn.Conv2d(8, 32, 3, groups=4), nn.ConvTranspose2d(8, 32, 2), nn.Conv2d(8, 16, 1), nn.Linear(5, 15)]
    optimizer = Eva(nn.Sequential(*layers))
    assert ["output_vector" in optimizer.state[layer.weight] for layer in layers] == [False, False, True, False]


def test_a_step_that_is_left_out_leaves_the_vector():
    torch.manual_seed(0)
    model = nn.Linear(4, 16)
    optimizer = Eva(model)
    for factor in (1.0, float("nan")):
        before = optimizer.state[model.weight]["output_vector"].clone()
        (model(torch.randn(5, 4)).square().sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(before.square().sum()) == pytest.approx(1, abs=1e-5)
    assert torch.equal(optimizer.state[model.weight]["output_vector"], before)


def are_finite(model):
    return all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("cls", [Eva, EvaF])
@pytest.mark.parametrize("foreach", [None, False])
def test_an_input_that_dies_fades_from_its_vector(cls, foreach):
    """After some 130 steps the vector's square is so small that it has no inverse in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20, bias=False), nn.Linear(20, 2))
    optimizer = cls(model, foreach=foreach)
    for step in range(300):
        model(torch.randn(6, 4) * (step < 3)).sub(1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert are_finite(model)
