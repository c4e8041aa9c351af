"""Steps against a slow one, one tensor at a time and many at once, in low precision, and committed in parts."""

import pytest
import torch
from torch import nn

from gradweave.optim import Eva, EvaF, EvaS
from optim.models import images, make_conv, train, weights

BOTH = pytest.mark.parametrize("cls", [Eva, EvaF])


FORMS = pytest.mark.parametrize("foreach", [True, False])


def give(model, seed, factor=1.0):
    """Gradients and inputs of a linear model, as if a backward had left them."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = (torch.randn(p.shape, generator=generator, dtype=torch.float64) * factor).to(p.dtype)
    return torch.randn(model.in_features, generator=generator, dtype=torch.float64)


def see(optimizer, model, vector):
    """Has an optimizer see a mean input."""
    record = optimizer.state[model.weight]["record"]
    record.zero_()
    record[: model.in_features], record[model.in_features] = vector.to(record.dtype), 1.0


@FORMS
def test_a_step_is_the_slow_one(foreach):
    """Rows of X, less what is along the running input vector, each of one length."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4).double()
    weight = torch.cat((model.weight, model.bias[:, None]), 1).detach()
    optimizer = EvaF(model, lr=0.1, momentum=0.7, weight_decay=0.2, damping=0.3, running_average=0.4, foreach=foreach)
    size = torch.linalg.vector_norm(model.weight.detach())
    momentum, running = torch.zeros_like(weight), None
    for seed in range(4):
        vector = give(model, seed)
        see(optimizer, model, vector)
        running = vector if running is None else running + 0.4 * (vector - running)
        a = torch.cat((running, torch.ones(1, dtype=torch.float64)))
        gradient = torch.cat((model.weight.grad, model.bias.grad[:, None]), 1)
        momentum = 0.7 * momentum + gradient
        x = gradient + 0.7 * momentum
        x = x - torch.outer(x @ a, a) / (1.3 * a @ a)
        step = x / torch.linalg.vector_norm(x, dim=1, keepdim=True) * size / 2
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * step
        optimizer.step()
        torch.testing.assert_close(
            torch.cat((model.weight, model.bias[:, None]), 1).detach(), weight, rtol=1e-6, atol=1e-7
        )


@BOTH
@FORMS
def test_rows_without_a_gradient_stay_whatever_momentum_they_have(cls, foreach):
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    optimizer = cls(model, lr=0.1, foreach=foreach)
    for seed in range(3):
        see(optimizer, model, give(model, seed))
        optimizer.step()
    for _ in range(5):
        see(optimizer, model, give(model, 9))
        model.weight.grad[1:] = 0
        model.bias.grad[2:] = 0
        before = model.weight.detach().clone(), model.bias.detach().clone()
        optimizer.step()
        moved = (model.weight != before[0]).any(1)
        assert moved.tolist() == [True, True, False, False]
        assert torch.equal(model.bias[2:], before[1][2:])
    model.weight.grad.zero_()
    model.bias.grad.zero_()
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before)


@BOTH
@FORMS
@pytest.mark.parametrize(("dtype", "factor", "scale", "most"), [
    (torch.bfloat16, 1.0, 1.0, 0.02), (torch.float16, 1.0, 1.0, 0.003), (torch.float16, 1e-3, 65536.0, 0.003),
])  # fmt: skip
def test_steps_in_low_precision_are_those_in_double(cls, foreach, dtype, factor, scale, most):
    """With a loss scale where gradients would be lost without it; the change of weights is compared, not weights."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30).to(dtype)
    slow = nn.Linear(40, 30).double()
    slow.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
    fast, exact = cls(model, lr=1.0, foreach=foreach), cls(slow, lr=1.0, foreach=foreach)
    for seed in range(3):
        vector = give(model, seed, factor)
        for p, q in zip(model.parameters(), slow.parameters(), strict=True):
            q.grad = p.grad.double() / scale
        see(fast, model, vector)
        see(exact, slow, vector)
        if scale != 1.0:
            fast.grad_scale, fast.found_inf = torch.tensor(scale), torch.zeros(1)
        with torch.no_grad():
            for p, q in zip(model.parameters(), slow.parameters(), strict=True):
                p.zero_()
                q.zero_()
        fast.step()
        exact.step()
        for p, q in zip(model.parameters(), slow.parameters(), strict=True):
            off = torch.linalg.vector_norm(p.double() - q) / torch.linalg.vector_norm(q)
            assert off < most, float(off)


@FORMS
def test_half_precision_under_a_scaler_that_finds_its_scale(foreach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).half()
    optimizer = EvaF(model, lr=0.02, foreach=foreach)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5)
    x = torch.randn(32, 6).half()
    losses = []
    for _ in range(40):
        loss = model(x).float().square().mean() * 1e-5
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert losses[-1] < 0.5 * losses[0]
    kept = optimizer.state_dict()
    other = EvaF(model, lr=0.02, foreach=foreach)
    other.load_state_dict(kept)
    assert other.state[model[0].weight]["momentum_buffer"].dtype == torch.float32
    assert torch.equal(
        other.state[model[0].weight]["momentum_buffer"], optimizer.state[model[0].weight]["momentum_buffer"]
    )


FAMILY = [Eva, EvaF, EvaS]


every = pytest.mark.parametrize("cls", FAMILY)


@every
def test_many_tensors_at_once_give_the_same(cls):
    results = []
    for foreach in (True, False):
        model = make_conv().double()
        train(model, cls(model, foreach=foreach, weight_decay=0.1), [x.double() for x in images(3)])
        results.append(weights(model))
    assert torch.allclose(results[0], results[1], atol=1e-6)


@every
def test_a_commit_that_fails_is_not_repeated(cls, monkeypatch):
    """What was updated before the failure stays as it is, and the rest can still be committed."""
    ends = []
    for fails in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.LayerNorm(5))
        optimizer = cls(model, lr=0.1)
        model(torch.randn(6, 4)).square().sum().backward()
        commit = optimizer.prepare_step()
        weight, (scale, shift) = model[0].weight, model[1].parameters()
        with torch.no_grad():
            if fails:
                with monkeypatch.context() as patch:
                    patch.setattr("gradweave.optim.first_order.update", fail)
                    with pytest.raises(RuntimeError, match="failed"):
                        commit([weight, scale])
                moved = weight.detach().clone()
            commit([weight, scale, shift])
            commit([weight, scale, shift])
        assert not fails or torch.equal(weight, moved)
        ends.append(weights(model))
    assert torch.equal(*ends)


def fail(*_):
    raise RuntimeError("failed")
