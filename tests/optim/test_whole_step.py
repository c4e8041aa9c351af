"""The family inside a compiled step: vectors are caught and used in one and the same graph."""

import pytest
import torch
from torch import nn

import gradweave
from gradweave.optim import Eva, EvaF, EvaS
from optim.models import images, loss_of, make_conv, make_mlp, rows, train, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated")


@pytest.mark.parametrize(
    ("cls", "mode", "make", "batches"),
    [
        (Eva, {}, make_conv, images(4)),
        (EvaF, {"reference": True, "lr": 0.02}, make_mlp, rows(4)),
        (EvaS, {}, make_mlp, rows(4)),
    ],
)
def test_replayed_steps_are_the_eager_ones_bit_for_bit(cls, mode, make, batches):
    model, other = make(), make()
    optimizer, stock = (cls(m, foreach=False, **mode) for m in (model, other))
    step = gradweave.compile(model, loss_of, optimizer, lower="replay")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    same = torch.optim.lr_scheduler.ExponentialLR(stock, 0.7)
    for x in batches:
        loss = step(x)
        assert [loss.item()] == train(other, stock, [x])
        scheduler.step()
        same.step()
    assert torch.equal(weights(model), weights(other))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in stock.state[q].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[p][key])), key


def test_compiled_steps_follow_the_eager_ones():
    model, other = make_mlp(), make_mlp()
    optimizer, stock = Eva(model), Eva(other)
    step = gradweave.compile(model, loss_of, optimizer)
    losses = [step(x).item() for x in rows(6)]
    assert losses == pytest.approx(train(other, stock, rows(6)), rel=1e-4)
    vector = optimizer.state[model[0].weight]["input_vector"]
    assert torch.allclose(vector, stock.state[other[0].weight]["input_vector"], atol=1e-5)
    assert optimizer.state[model[0].weight]["record"].count_nonzero() == 0


def test_micro_batches_scaling_and_clipping_in_a_compiled_step():
    model, other = make_mlp(), make_mlp()
    optimizer, stock = Eva(model), Eva(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    step = gradweave.compile(model, loss_of, optimizer, lower="replay", scaler=scaler, max_grad_norm=0.5)
    for x in rows(4):
        halves = x.split(6)
        with step.no_update():
            step(halves[0])
        step(halves[1])
        for half in halves:
            loss_of(other, half).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        stock.step()
        stock.zero_grad()
    assert torch.allclose(weights(model), weights(other), atol=1e-5)


def test_layers_that_are_not_used_do_no_harm():
    model, other = (nn.ModuleList([make_mlp(), nn.Linear(3, 3)]) for _ in range(2))
    other[1].load_state_dict(model[1].state_dict())
    step = gradweave.compile(model, lambda m, x: loss_of(m[0], x), EvaF(model, foreach=False), lower="replay")
    losses = [step(x).item() for x in rows(4)]
    assert losses == train(other, EvaF(other, foreach=False), rows(4), loss=lambda m, x: loss_of(m[0], x))
    assert torch.equal(weights(model), weights(other))
