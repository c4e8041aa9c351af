"""The family beside other techniques: the weights of the family alone, or an error."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import gradweave
from gradweave.errors import UnsupportedError
from gradweave.optim import Eva, EvaF, EvaS

FAMILY = [Eva, EvaF, EvaS]


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 6, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def train(model, optimizer, steps=5):
    for step in range(steps):
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", FAMILY)
def test_reorder(kind):
    alone, beside = make(), make()
    expected = train(alone, kind(alone, lr=0.05))
    optimizer = kind(beside, lr=0.05)
    with gradweave.reorder(beside, policy="side_stream"):
        assert torch.equal(train(beside, optimizer), expected)


@pytest.mark.parametrize("kind", FAMILY)
def test_daso_of_one_process(kind):
    alone, beside = make(), make()
    expected = train(alone, kind(alone, lr=0.05))
    optimizer = kind(beside, lr=0.05)
    daso = gradweave.DASO(beside, optimizer)
    assert torch.equal(train(beside, optimizer), expected)
    daso.finish()


@pytest.mark.parametrize("kind", FAMILY)
def test_data_parallel_is_refused(kind):
    model = make()
    with pytest.raises(UnsupportedError, match=r"all gradients at once.*DistributedDataParallel"):
        gradweave.DataParallel(model, kind(model, lr=0.05))


@pytest.mark.parametrize("kind", FAMILY)
def test_a_pipeline_of_one_rank(kind, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make()
        pipe = gradweave.Pipeline(model, F.cross_entropy, microbatches=2, policy="fast_forward")
        optimizer = kind(pipe.module, lr=0.05)
        stock = make()
        reference = kind(stock, lr=0.05)
        for step in range(3):
            x, y = batch(step)
            pipe.step(x, y)
            for x_part, y_part in zip(x.chunk(2), y.chunk(2), strict=True):
                (F.cross_entropy(stock(x_part), y_part) / 2).backward()
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
        for p, q in zip(pipe.module.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(p, q)
        pipe.close()
    finally:
        dist.destroy_process_group()


def test_two_on_two_parts_of_a_model():
    model = make()
    front, back = nn.Sequential(*model[:3]), nn.Sequential(*model[3:])
    optimizers = Eva(front, lr=0.05), EvaF(back, lr=0.05)
    losses = []
    for step in range(30):
        x, y = batch(step % 2)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert not set(optimizers[0].state) & set(optimizers[1].state)
