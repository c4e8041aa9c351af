"""Small models and training loops that tests run stock and fused."""

import torch
from torch import nn
from torch.nn import functional as F

from gradweave import _logging
from gradweave.fusion import fuse


class Net(nn.Module):
    """Linear and norm layers, a weight used twice, and a parameter used without a module call."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.twice = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(torch.relu(self.inner(x)))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.head(x * self.scale)


def make_net(dtype=torch.float32, cls=Net):
    torch.manual_seed(0)
    return cls().to(dtype)


def batches(count, dtype=torch.float32, size=5):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(size, 6, generator=generator).to(dtype)
        yield x, torch.randint(0, 3, (size,), generator=generator)


def loss_of(model, x, y):
    return F.cross_entropy(model(x).float(), y)


def train(
    make_optimizer, mode=None, steps=6, dtype=torch.float32, before_step=None, make_scheduler=None, cls=Net, **more
):
    """Train a new net; return it with its optimizer, detached."""
    model = make_net(dtype, cls)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    fusion = fuse(model, optimizer, mode, **more) if mode else None
    for x, y in batches(steps, dtype):
        loss_of(model, x, y).backward()
        if before_step:
            before_step(model)
        optimizer.step()
        if scheduler:
            scheduler.step()
        optimizer.zero_grad()
    if fusion:
        fusion.detach()
    return model, optimizer


def assert_same(one, other):
    """Assert that parameters, buffers and optimizer state are equal, bit for bit."""
    (model, optimizer), (other_model, other_optimizer) = one, other
    mine, theirs = model.state_dict(), other_model.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    mine, theirs = optimizer.state_dict(), other_optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, state in mine["state"].items():
        assert state.keys() == theirs["state"][index].keys()
        for key, value in state.items():
            other_value = theirs["state"][index][key]
            same = torch.equal(value, other_value) if isinstance(value, torch.Tensor) else value == other_value
            assert same, (index, key)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def announce_again():
    """Let messages that were announced once in this process be announced again."""
    _logging._log_once.cache_clear()
